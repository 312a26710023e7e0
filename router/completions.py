"""Text completions: the JSON of `text_completion`, whole and streamed, with the echo of the prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.router.detokenize import Piece, TokenTable
from tailrace.router.flow import Flow
from tailrace.router.formats import Reply, TextLogprobs, dumps, joined, usage_of
from tailrace.router.tokenization import Echo


class CompletionFormat:
    """See formats.Format.

    Args:
        echoes: the text of each prompt, in order, where it is asked back.
    """

    def __init__(self, reply: Reply, table: TokenTable, echoes: Sequence[Echo | None]) -> None:
        self._reply, self._echoes = reply, echoes
        self._logprobs = [TextLogprobs(table) for _ in range(len(echoes) * reply.samples)]
        head = {
            "id": reply.id, "object": "text_completion", "created": reply.created, "model": reply.model,
            "system_fingerprint": None,
        }  # fmt: skip
        self._head = f"data: {dumps(head)[:-1]},"
        self._usage = ',"usage":null' if reply.with_usage else ""

    def _event(self, choice: int, text: str, logprobs: str, finish: str = "null", ids: Sequence[int] = ()) -> str:
        extra = f',"token_ids":{dumps(list(ids))}' if self._reply.with_token_ids else ""
        return (
            f'{self._head}"choices":[{{"index":{choice},"text":{dumps(text)},"logprobs":{logprobs}{extra},'
            f'"finish_reason":{finish}}}]{self._usage}}}\n\n'
        )

    def opening(self, choice: int, flow: Flow) -> str:
        echo = self._echoes[choice // self._reply.samples]
        if echo is None:
            return ""
        text, logprobs = self._echoed(choice, echo, flow)
        return self._event(choice, text, dumps(logprobs))

    def piece(self, choice: int, piece: Piece) -> str:
        ids = () if piece.token is None else (piece.token,)
        return self._event(choice, piece.text, self._of([piece], choice), ids=ids)

    def closing(self, choice: int, finish: str, last: Piece | None) -> str:
        pieces = [] if last is None else [last]
        ids = [p.token for p in pieces if p.token is not None]
        return self._event(choice, "", self._of(pieces, choice), f'"{finish}"', ids)

    def usage(self, flows: Sequence[Flow]) -> str:
        return f'{self._head}"choices":[],"usage":{dumps(usage_of(flows))}}}\n\n'

    def whole(self, flows: Sequence[Flow]) -> dict[str, Any]:
        choices = []
        for flow, echo in zip(flows, self._echoes, strict=True):
            for sample in flow.samples:
                index, pieces = len(choices), sample.take()
                text, logprobs = "", None
                if echo is not None:
                    text, logprobs = self._echoed(index, echo, flow)
                if self._reply.with_logprobs:
                    own = self._logprobs[index].of_pieces(pieces)
                    logprobs = own if logprobs is None else joined(logprobs, own)
                choice: dict[str, Any] = {
                    "index": index,
                    "text": text + "".join(piece.text for piece in pieces),
                    "logprobs": logprobs,
                    "finish_reason": sample.finish,
                }
                if self._reply.with_token_ids:
                    choice["token_ids"] = sample.ids
                choices.append(choice)
        return {
            "id": self._reply.id,
            "object": "text_completion",
            "created": self._reply.created,
            "model": self._reply.model,
            "choices": choices,
            "usage": usage_of(flows),
            "system_fingerprint": None,
        }

    def _of(self, pieces: list[Piece], choice: int) -> str:
        if not self._reply.with_logprobs or not pieces:
            return "null"
        return dumps(self._logprobs[choice].of_pieces(pieces))

    def _echoed(self, choice: int, echo: Echo, flow: Flow) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text and, if asked for, its logprobs; then the text is what its tokens spell."""
        if not self._reply.with_logprobs:
            return echo.text, None
        logprobs = self._logprobs[choice].of_prompt(flow.spec.prompt_ids, echo.pieces, flow.prompt_logprobs)
        return "".join(echo.pieces), logprobs
