"""How many guesses each decode row verifies and asks for (engine/drafts.py), and how many of them were right.

A verified guess lengthens the step for all rows and pays only if it is right. So guesses are taken in the order of
their chance to be reached and right, over all rows, as long as the expected tokens a second rise: DSpark's
confidence-scheduled verification (Algorithm 1 of its paper). What a step of so many tokens takes is measured.

What guesses cannot serve decodes without them and is counted by reason: draws that depend on which tokens came before
(penalties, grammars). Pure; dies with its loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from operator import mul

from tailrace.engine.sequence import Chunk, Sequence
from tailrace.model.sampling_params import SamplingParams

_NEW = 0.05  # weight of the newest step in what is measured

UNFIT_PENALTIES, UNFIT_GRAMMAR, UNFIT_SHORT = "penalties", "grammar", "max_tokens"


def unfit_reason(params: SamplingParams) -> str | None:
    """Why a request is decoded without guesses, one word; None if it is not."""
    if params.grammar:
        return UNFIT_GRAMMAR
    if params.needs_counts:
        return UNFIT_PENALTIES
    return UNFIT_SHORT if params.max_tokens < 3 else None  # the first token and the last are never guessed


def count_unfit(sequences: Seq[Sequence], counts: dict[str, int]) -> None:
    """Note a request that is decoded without guesses, by reason. sequences: all of the request's."""
    states = [state for sequence in sequences for state in sequence.samplers]
    reason = unfit_reason(states[0].params) if states else None
    if reason is not None:
        counts[reason] = counts.get(reason, 0) + 1


def verification_lengths(
    survival: Seq[Seq[float]], num_known: int, steps_per_s: Callable[[int], float], budget: int
) -> list[int]:
    """How many guesses of each row to verify, so that expected tokens a second are highest.

    Args:
        survival: of each row and guess, the chance that it and all before it are right; falling along a row.
        num_known: tokens of the step without guesses.
        steps_per_s: of steps of so many tokens.
        budget: guesses at most.

    Returns:
        One number a row. Of equal chances the earlier guess goes first, then the earlier row; of equal rates the fewer.
    """
    order = sorted((-chance, at, row) for row, chances in enumerate(survival) for at, chance in enumerate(chances))
    expected = float(len(survival))  # each row has one token for certain
    best, taken = expected * steps_per_s(num_known), 0
    for count, (chance, _, _) in enumerate(order[:budget], 1):
        expected -= chance
        rate = expected * steps_per_s(num_known + count)
        if rate > best:
            best, taken = rate, count
    lengths = [0] * len(survival)
    for _, _, row in order[:taken]:
        lengths[row] += 1
    return lengths


class StepCost:
    """Seconds of a step as a line over its tokens, fitted to the last steps."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = self._squares = self._products = 0.0  # weighted sums

    def measure(self, num_tokens: int, seconds: float) -> None:
        keep = 1.0 - _NEW
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + num_tokens**2
        self._products = keep * self._products + num_tokens * seconds

    def line(self) -> tuple[float, float] | None:
        """(seconds of a step without tokens, seconds a token), neither below 0; None until two sizes are known."""
        if not self._weight:
            return None
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens**2
        if spread < 1e-6 * max(1.0, tokens**2) or seconds <= 0:
            return None
        slope = (self._products / self._weight - tokens * seconds) / spread
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds - slope * tokens, slope


class Drafting:
    """See the module.

    Args:
        num_tokens: guesses a row at most, at least 1.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._cost = StepCost()

    def measure(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._cost.measure(num_tokens, seconds)

    def plan(self, chunks: list[Chunk], room: Callable[[Sequence, int], int], budget: int) -> list[Chunk]:
        """The decode rows of a pass with guesses to verify and to ask for.

        Args:
            chunks: all known tokens of each running sequence.
            room: of the sequence's pages, for so many guesses: how many fit.
            budget: guesses of the pass at most.
        """
        survival = [list(accumulate(c.sequence.chances[: self._limit(c.sequence)], mul)) for c in chunks]
        known = sum(chunk.num_tokens for chunk in chunks)
        lengths = verification_lengths(survival, known, self._steps_per_s, max(0, budget))
        planned = []
        for chunk, length in zip(chunks, lengths, strict=True):
            fitting = room(chunk.sequence, length) if length else 0
            planned.append(replace(chunk, num_drafts=fitting, want_drafts=self._wanted(chunk.sequence)))
        return planned

    def asking(self, chunk: Chunk) -> Chunk:
        """A prefill chunk, which asks for guesses if one sample begins or goes on behind it."""
        if not chunk.last or len(chunk.sequence.samplers) != 1:
            return chunk
        return replace(chunk, want_drafts=self._wanted(chunk.sequence))

    def _steps_per_s(self, num_tokens: int) -> float:
        """1 while nothing is known: then every guess pays."""
        line = self._cost.line()
        if line is None:
            return 1.0
        seconds = line[0] + line[1] * num_tokens
        return 1.0 / seconds if seconds > 0 else math.inf

    def _limit(self, sequence: Sequence) -> int:
        """Guesses that may become tokens: behind the last of them one more is drawn, max_tokens included."""
        state = sequence.samplers[0]
        left = state.params.max_tokens - state.num_output_tokens - 1
        return max(0, min(self._num_tokens, len(sequence.drafts), left))

    def _wanted(self, sequence: Sequence) -> int:
        state = sequence.samplers[0]
        if unfit_reason(state.params) is not None:
            return 0
        return max(0, min(self._num_tokens, state.params.max_tokens - state.num_output_tokens - 2))
