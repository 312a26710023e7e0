"""Chat completions: the JSON of `chat.completion` and its chunks. Pure; see formats.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.router.detokenize import Piece, TokenTable
from tailrace.router.flow import Flow
from tailrace.router.formats import Reply, chat_logprob, dumps, usage_of


class ChatFormat:
    """See formats.Format."""

    def __init__(self, reply: Reply, table: TokenTable) -> None:
        self._reply, self._table = reply, table
        self._head = (
            f'data: {{"id":{dumps(reply.id)},"object":"chat.completion.chunk","created":{reply.created},'
            f'"model":{dumps(reply.model)},"system_fingerprint":null,'
        )
        self._usage = ',"usage":null' if reply.with_usage else ""

    def _event(self, choice: int, delta: str, finish: str = "null", piece: Piece | None = None) -> str:
        extra = ""
        if self._reply.with_logprobs:
            content = [] if piece is None else chat_logprob(self._table, piece)
            extra = f',"logprobs":{dumps({"content": content, "refusal": None}) if content else "null"}'
        else:
            extra = ',"logprobs":null'
        if self._reply.with_token_ids:
            extra += f',"token_ids":{dumps([] if piece is None or piece.token is None else [piece.token])}'
        return (
            f'{self._head}"choices":[{{"index":{choice},"delta":{delta}{extra},"finish_reason":{finish}}}]'
            f"{self._usage}}}\n\n"
        )

    def opening(self, choice: int, flow: Flow) -> str:
        return self._event(choice, '{"role":"assistant","content":""}')

    def piece(self, choice: int, piece: Piece) -> str:
        return self._event(choice, f'{{"content":{dumps(piece.text)}}}', piece=piece)

    def closing(self, choice: int, finish: str, last: Piece | None) -> str:
        return self._event(choice, "{}", f'"{finish}"', last)

    def usage(self, flows: Sequence[Flow]) -> str:
        return f'{self._head}"choices":[],"usage":{dumps(usage_of(flows))}}}\n\n'

    def whole(self, flows: Sequence[Flow]) -> dict[str, Any]:
        choices = []
        for flow in flows:
            for sample in flow.samples:
                pieces = sample.take()
                logprobs = None
                if self._reply.with_logprobs:
                    content = [entry for piece in pieces for entry in chat_logprob(self._table, piece)]
                    logprobs = {"content": content, "refusal": None}
                text = "".join(piece.text for piece in pieces)
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": logprobs,
                    "finish_reason": sample.finish,
                }
                if self._reply.with_token_ids:
                    choice["token_ids"] = sample.ids
                choices.append(choice)
        return {
            "id": self._reply.id,
            "object": "chat.completion",
            "created": self._reply.created,
            "model": self._reply.model,
            "choices": choices,
            "usage": usage_of(flows),
            "system_fingerprint": None,
        }
