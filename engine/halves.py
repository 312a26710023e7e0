"""A large step on two threads: its rows in two halves, each with a forward pass of its own.

Two threads that share each operator meet after each, and waking a sleeping thread costs more than most of a layer's
operators; two halves meet once a layer: the second half reads a layer's pages when the first has written its own there.

Knows rows and pages, no model. A half that fails lets the other end and then raises in the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import torch

from tailrace.engine.step import Row

MIN_TOKENS = 128  # of a step in halves; below it the products alone on two threads are as fast
_CUT_TOKENS = 32  # a half's tokens are a multiple of this, because rows are padded to it

Between = Callable[[], None]
"""Called once a layer, after its keys and values are written and before any are read."""

RunHalf = Callable[[Sequence[Row], Between], torch.Tensor]
"""Forward of some rows -> [tokens, hidden_size]."""


class FirstHalfFailed(RuntimeError):
    """The second half's pages will not come; the caller sees the first half's own error."""


def in_halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]] | None:
    """Cut a step's rows into two parts of about equal length, the row in the middle by its tokens.

    Args:
        rows: those of one token first.

    Returns:
        Both parts, in order and again with rows of one token first; None if the step is too small or has no such cut.
    """
    total = sum(len(row.ids) for row in rows)
    if total < MIN_TOKENS:
        return None
    first: list[Row] = []
    left = -(-total // 2)
    for index, row in enumerate(rows):
        count = len(row.ids)
        if count < left:
            first.append(row)
            left -= count
            continue
        cut = min(count, -(-left // _CUT_TOKENS) * _CUT_TOKENS)
        first.append(replace(row, ids=row.ids[:cut]))
        second = list(rows[index + 1 :])
        if cut < count:
            second.insert(0, replace(row, ids=row.ids[cut:], start=row.start + cut))
        in_order = all(_in_order(part) for part in (first, second))
        return (first, second) if second and in_order else None
    return None


def _in_order(rows: Sequence[Row]) -> bool:
    """Whether no row of several tokens stands before one of a single token."""
    single = [len(row.ids) == 1 for row in rows]
    return sorted(single, reverse=True) == single


class Halves:
    """The second thread, kept from step to step."""

    def __init__(self) -> None:
        self._second = ThreadPoolExecutor(1, thread_name_prefix="second-half")

    def run(self, halves: tuple[Sequence[Row], Sequence[Row]], run: RunHalf) -> torch.Tensor:
        """Both halves -> [tokens, hidden_size], in the order of their rows. Raises what `run` raised."""
        written: SimpleQueue[bool] = SimpleQueue()  # an entry a layer; False: there will be no more
        second = self._second.submit(_second_half, halves[1], run, written)
        try:
            first = run(halves[0], lambda: written.put(True))
        except BaseException:
            written.put(False)
            second.exception()  # it may read pages until it has ended
            raise
        return torch.cat((first, second.result()))


@torch.inference_mode()
def _second_half(rows: Sequence[Row], run: RunHalf, written: SimpleQueue[bool]) -> torch.Tensor:
    def wait() -> None:
        if not written.get():
            raise FirstHalfFailed

    return run(rows, wait)
