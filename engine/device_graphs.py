"""Which steps of a device run from a captured CUDA graph, and from which. Plain Python: knows no tensor and no CUDA.

A graph replays one shape. A step is padded to the next shape that was captured; one that is larger than all, or of a
sampling variant that was not asked for, runs eagerly, with the same result. Two kinds of graph make up a step:

    body   the forward pass: of decode rows alone, by their number; of prompt chunks alone, by their tokens; of chunks
           beside decode rows, by the chunks' tokens, the rows padded to the largest batch
    head   output projection and sampling, by the number of rows and the variant

so that variants multiply only the short part.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

GREEDY, TEMPERATURE_ONLY, ADVANCED = VARIANTS = ("greedy", "temperature_only", "advanced")

_SMALL_BATCHES = (1, 2, 4, 8)
_BATCH_STEP, _BATCH_STEP_ENDS, _LARGE_BATCH_STEP = 16, 256, 128
_TOKEN_POWERS = tuple(2**i for i in range(8))  # 1, 2, 4 .. 128
_TOKEN_STEP = 256
GRAPH_CHUNKS = 8  # in a graph of prompt chunks; more run eagerly
_BESIDE_MOST = 1024  # a larger step takes longer on the device than its eager launch does (measured for 8B)

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Runs and records what its argument launches; gives what launches it again."""


def batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Derived capture_batch_sizes: 1, 2, 4, 8, 16, 32, 48 .. 256, then in steps of 128, and max_batch_size."""
    sizes = [*_SMALL_BATCHES, *range(_BATCH_STEP, _BATCH_STEP_ENDS + 1, _BATCH_STEP)]
    sizes += range(_BATCH_STEP_ENDS + _LARGE_BATCH_STEP, max_batch_size, _LARGE_BATCH_STEP)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


def token_counts(max_num_tokens: int) -> tuple[int, ...]:
    """Captured tokens of prompt chunks: 1, 2, 4 .. 128, then multiples of 256, then max_num_tokens once."""
    counts = [*_TOKEN_POWERS, *range(_TOKEN_STEP, max_num_tokens, _TOKEN_STEP)]
    return (*(count for count in counts if count < max_num_tokens), max_num_tokens)


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """What is captured at warm-up.

    Attributes:
        rows: numbers of decode rows, rising.
        tokens: numbers of tokens of prompt chunks, rising; none: chunks run eagerly.
        variants: of VARIANTS.
        beside: numbers of tokens of prompt chunks beside decode rows, rising; these are padded to the last of `rows`.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    variants: tuple[str, ...]
    beside: tuple[int, ...] = ()

    @classmethod
    def derive(
        cls,
        max_batch_size: int,
        max_num_tokens: int,
        rows: Sequence[int] | None = None,
        variants: Sequence[str] | None = None,
        *,
        mixes: bool = False,
    ) -> CaptureSizes:
        """Those that were configured, and what follows from the limits where nothing was. `mixes`: chunks run beside
        decode rows."""
        chosen = batch_sizes(max_batch_size) if rows is None else tuple(sorted(set(rows)))
        wanted = VARIANTS if variants is None else tuple(v for v in VARIANTS if v in variants)
        tokens = token_counts(max_num_tokens)
        return cls(chosen, tokens, wanted, tuple(t for t in tokens if mixes and t <= _BESIDE_MOST))

    @property
    def heads(self) -> tuple[int, ...]:
        """Numbers of rows of a head, rising: beside the largest batch the chunks draw, too."""
        return (*self.rows, self.rows[-1] + GRAPH_CHUNKS) if self.rows and self.beside else self.rows

    def padded_head(self, picks: int) -> int | None:
        """The number of rows that a head of so many is padded to; None: none is large enough."""
        return _next(self.heads, picks)

    def padded_rows(self, rows: int) -> int | None:
        """The number of rows that a step of so many is padded to; None: none is large enough."""
        return _next(self.rows, rows)

    def padded_tokens(self, tokens: int) -> int | None:
        """The same of a step of prompt chunks alone."""
        return _next(self.tokens, tokens)

    def padded_beside(self, rows: int, tokens: int) -> tuple[int, int] | None:
        """The rows and the chunks' tokens that a step of both is padded to."""
        padded = _next(self.beside, tokens)
        return None if padded is None or not self.rows or rows > self.rows[-1] else (self.rows[-1], padded)


def _next(sizes: Sequence[int], wanted: int) -> int | None:
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None


class GraphBook:
    """The captured graphs by key, and whether a step finds one.

    Args:
        capture: makes a graph of what its argument launches.

    Attributes:
        replayed, eager: steps' parts so far that ran from a graph, and that did not.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._graphs: dict[Hashable, Run] = {}
        self._told: set[str] = set()
        self.replayed = self.eager = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def add(self, key: Hashable, run: Run) -> None:
        """Capture `run`; a key is captured once."""
        if key in self._graphs:
            raise ValueError(f"graph {key!r} is captured already")
        self._graphs[key] = self._capture(run)

    def run(self, key: Hashable, run: Run) -> bool:
        """Launch it from its graph, or as it is if there is none. True if from a graph."""
        graph = self._graphs.get(key)
        if graph is None:
            self.eager += 1
            run()
            return False
        self.replayed += 1
        graph()
        return True

    def tell_variant(self, variant: str) -> None:
        """A step wants a variant that is not captured; the first time this is logged."""
        if variant not in self._told:
            self._told.add(variant)
            log.warning("sampling_variant_runs_eagerly", extra={"fields": {"variant": variant}})
