"""One sample of a request as its ingress sees it: the ids that arrived, in order and once, and the pieces not yet sent.

Deltas come over two links (first token from ctx, the rest from gen), so they may overlap, repeat or come early; `start`
says where each belongs. Unsent pieces wait here, so a slow client costs at most its own max_tokens. Pure.
"""

from __future__ import annotations

from enum import Enum

from tailrace.router.detokenize import Piece, TextStream
from tailrace.transfer.messages import Delta, unpack_ids


class Receipt(Enum):
    NEW = "new"  # brought tokens or the end
    STALE = "stale"  # nothing that was not known
    EARLY = "early"  # kept until what lies before it has come


class Sample:
    """State of one sample.

    Attributes:
        ids: every output token up to the end, those of a stop string and the stop id included.
        pieces: decided and not taken yet.
        finish: None while it runs, then `stop` or `length`.
        cut: it was ended here, by a stop string, so a worker may still be generating.
        ended_by_id: its last id is EOS or a stop id, which has no text.
    """

    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index
        self.ids: list[int] = []
        self.pieces: list[Piece] = []
        self.finish: str | None = None
        self.cut = False
        self.ended_by_id = False
        self._text = text
        self._early: dict[int, Delta] = {}

    @property
    def waits_for_gap(self) -> bool:
        """Later tokens are here, earlier ones are not."""
        return bool(self._early)

    def take(self) -> list[Piece]:
        """The pieces decided since the last call."""
        taken, self.pieces = self.pieces, []
        return taken

    def receive(self, delta: Delta) -> Receipt:
        """Add what the delta brings; raises ValueError if its ids or logprobs are malformed."""
        if self.finish is not None:
            return Receipt.STALE
        if delta.start > len(self.ids):
            known = self._early.get(delta.start)
            if known is None or len(delta.ids) > len(known.ids) or delta.finish is not None:
                self._early[delta.start] = delta
            return Receipt.EARLY
        if not self._add(delta):
            return Receipt.STALE
        while self._early and self.finish is None and (start := min(self._early)) <= len(self.ids):
            self._add(self._early.pop(start))
        return Receipt.NEW

    def forget_early(self) -> None:
        """A new attempt begins: what the old one sent out of order is void."""
        self._early.clear()

    def _add(self, delta: Delta) -> bool:
        ids = unpack_ids(delta.ids)
        known = len(self.ids) - delta.start
        if known > len(ids) or (known == len(ids) and delta.finish is None):
            return False
        logprobs = delta.logprobs
        if logprobs and len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} tokens")
        for i in range(known, len(ids)):
            ends = i == len(ids) - 1 and delta.finish == "stop" and delta.stop_id is not None
            self.ids.append(ids[i])
            self.ended_by_id = ends
            self._keep(self._text.push(ids[i], logprobs[i] if logprobs else None, ends=ends))
            if self._text.stopped:
                self.finish, self.cut = "stop", True
                return True
        if delta.finish is not None:
            self._keep(self._text.finish())
            self.finish = delta.finish
        return True

    def _keep(self, pieces: list[Piece]) -> None:
        """Text that no token brought goes with the last token, so that each token stays one piece."""
        for piece in pieces:
            if piece.token is None and self.pieces:
                last = self.pieces[-1]
                self.pieces[-1] = last._replace(text=last.text + piece.text)
            else:
                self.pieces.append(piece)
