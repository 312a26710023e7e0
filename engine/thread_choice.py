"""One thread or all for a small step: measured while serving, for it differs by machine and by what else runs there.

Waking a second thread for operators of some ten microseconds pays on one CPU and not on another, and never where cores
are taken. So now and then a few steps run the other way, and whichever was faster goes on. A trial that was lost is
repeated after twice as many steps, up to a limit, so that what trials cost stays a small share. A step on all threads
that takes far longer than usual brings the next trial forward: waiting for a thread without a core costs milliseconds.

Knows no tensors and no clock: it is told how long steps took. Dies with its rank.
"""

from __future__ import annotations

TRIAL_STEPS = 4
FIRST_WAIT, LONGEST_WAIT = 32, 4096  # steps between trials
MARGIN = 0.97  # the other way must be this much faster to be taken
FAR = 2.0  # times the usual duration


class ThreadChoice:
    """Steps in a row of the same number of tokens are compared, TRIAL_STEPS one way and as many the other.

    Args:
        few, many: the two numbers of threads. Begins with `few`.
    """

    def __init__(self, few: int, many: int) -> None:
        self._ways = (few, many)
        self._now = 0  # index of the way that won last
        self._wait = self._left = FIRST_WAIT
        self._times: list[float] = []  # of the way that won, then of the other
        self._tokens = 0
        self._usual = float("inf")

    @property
    def threads(self) -> int:
        """For the next small step."""
        return self._ways[self._now ^ self._tries]

    @property
    def _tries(self) -> bool:
        return len(self._times) >= TRIAL_STEPS

    def took(self, num_tokens: int, seconds: float) -> None:
        """A small step of that many tokens ran on `threads`."""
        if num_tokens != self._tokens:  # not to be compared with those before
            self._tokens, self._usual = num_tokens, float("inf")
            self._times.clear()
        if self._left > 0:
            self._left -= 1
            if self._now == 1 and seconds > FAR * self._usual:
                self._left = 0
            return
        self._times.append(seconds)
        if len(self._times) < 2 * TRIAL_STEPS:
            return
        won, tried = sum(self._times[:TRIAL_STEPS]), sum(self._times[TRIAL_STEPS:])
        self._times.clear()
        self._usual = min(won, tried) / TRIAL_STEPS
        if tried < MARGIN * won:
            self._now ^= 1
            self._wait = FIRST_WAIT
        else:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._left = self._wait
