"""How many prompt tokens may share a pass with streams that run here, so that these do not stall.

Where a gen computes a prompt itself, each of its chunks holds up every running stream by the time it takes. The chunk
is cut so that it takes at most `stall` times as long as a pass of the streams alone: a stream's tokens then come at
most 1 + `stall` times as far apart, however long the prompt. Without streams a chunk is as large as the pass allows.

Both times are measured, pass by pass. Pure; it dies with its loop.
"""

from __future__ import annotations

_NEW = 0.2  # weight of the newest pass


class PrefillShare:
    """See the module.

    Args:
        stall: what a chunk may take, over what a pass of the streams takes.
        least_tokens: a chunk's size where even that would take longer, or as long as nothing is measured.
    """

    def __init__(self, stall: float = 1.0, least_tokens: int = 16) -> None:
        self._stall, self._least = stall, least_tokens
        self._streams_s = 0.0  # a pass of streams alone
        self._token_s = 0.0  # a prompt token, beside them

    def limit(self, num_rows: int, budget: int) -> int:
        """Prompt tokens of the next pass, which has `num_rows` decode rows and room for `budget` more tokens."""
        if not num_rows:
            return budget
        tokens = int(self._stall * self._streams_s / self._token_s) if self._token_s else self._least
        return min(budget, max(tokens, self._least))

    def measure(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A pass of `num_rows` decode rows and `num_tokens` prompt tokens took so long."""
        if num_rows and not num_tokens:
            self._streams_s = _towards(self._streams_s, seconds)
        elif num_tokens:
            own_s = seconds - self._streams_s if num_rows else seconds
            self._token_s = _towards(self._token_s, max(own_s, seconds / 10) / num_tokens)


def _towards(known: float, value: float) -> float:
    return known + _NEW * (value - known) if known else value
