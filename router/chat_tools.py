"""Chat completions whose output may hold tool calls: `message.tool_calls`, whole and in stream events. Pure.

While tools are in play a token whose text is not decided yet makes no event of its own, unless its logprob or id was
asked for; they travel with the next text otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.router.chat import ChatFormat
from tailrace.router.detokenize import Piece, TokenTable
from tailrace.router.flow import Flow
from tailrace.router.formats import Reply, dumps
from tailrace.router.tool_calls import CallStart, Content, ToolEvent, ToolStream
from tailrace.router.tools import ToolPlan, ToolSupport


class ToolChatFormat(ChatFormat):
    """See formats.Format."""

    def __init__(self, reply: Reply, table: TokenTable, support: ToolSupport, plan: ToolPlan) -> None:
        super().__init__(reply, table)
        self._support, self._plan = support, plan
        self._streams: dict[int, ToolStream] = {}

    def piece(self, choice: int, piece: Piece) -> str:
        if choice not in self._streams:
            self._streams[choice] = self._support.stream(self._plan, eager=True)
        text = piece.text if piece.token is None else self._support.marks.get(piece.token, piece.text)
        return self._events(choice, self._streams[choice].feed(text), piece)

    def closing(self, choice: int, finish: str, last: Piece | None) -> str:
        stream = self._streams.get(choice)
        if stream is None:
            return super().closing(choice, finish, last)
        out = self._events(choice, stream.finish(cut=finish == "length"), None)
        return out + super().closing(choice, reason(finish, stream.num_calls), last)

    def whole(self, flows: Sequence[Flow]) -> dict[str, Any]:
        samples = [sample for flow in flows for sample in flow.samples]
        read = [self._read(list(sample.pieces), sample.finish or "") for sample in samples]  # `super` takes the pieces
        reply = super().whole(flows)
        for choice, (events, num_calls) in zip(reply["choices"], read, strict=True):
            message = choice["message"]
            message["content"] = "".join(e.text for e in events if isinstance(e, Content))
            choice["finish_reason"] = reason(choice["finish_reason"], num_calls)
            if num_calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = whole_calls(events)
        return reply

    def _read(self, pieces: list[Piece], finish: str) -> tuple[list[ToolEvent], int]:
        stream, marks = self._support.stream(self._plan, eager=False), self._support.marks
        events: list[ToolEvent] = []
        for piece in pieces:
            events += stream.feed(piece.text if piece.token is None else marks.get(piece.token, piece.text))
        events += stream.finish(cut=finish == "length")
        return events, len({e.index for e in events if isinstance(e, CallStart)})

    def _events(self, choice: int, events: list[ToolEvent], piece: Piece | None) -> str:
        asked = self._reply.with_logprobs or self._reply.with_token_ids
        if not events:
            return self._event(choice, '{"content":""}', piece=piece) if asked and piece is not None else ""
        out = []
        for event in events:
            out.append(self._event(choice, delta_of(event), piece=piece))
            piece = None  # its logprob stands once
        return "".join(out)


def delta_of(event: ToolEvent) -> str:
    """The `delta` of a stream event."""
    if isinstance(event, Content):
        return f'{{"content":{dumps(event.text)}}}'
    if isinstance(event, CallStart):
        call: dict[str, Any] = {"index": event.index, "id": event.id, "type": "function"}
        call["function"] = {"name": event.name, "arguments": ""}
    else:
        call = {"index": event.index, "function": {"arguments": event.text}}
    return f'{{"tool_calls":[{dumps(call)}]}}'


def whole_calls(events: Sequence[ToolEvent]) -> list[dict[str, Any]]:
    """`message.tool_calls` of one choice."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif not isinstance(event, Content):
            calls[event.index]["function"]["arguments"] += event.text
    return calls


def reason(finish: str, num_calls: int) -> str:
    """Calls that were cut off stay `length`."""
    return "tool_calls" if num_calls and finish == "stop" else finish
