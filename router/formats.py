"""From samples to OpenAI JSON, whole or as stream events; what chat and text completions share.

Every event is one `data:` line. JSON is written by hand around the parts that change with each token, since this is
the path of every token. Strings keep their Unicode, except the three line separators that some readers of lines split
at (U+0085, U+2028, U+2029), which are escaped. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Protocol

from tailrace.router.api_errors import Failure, error_body
from tailrace.router.detokenize import Piece, TokenTable
from tailrace.router.flow import Flow
from tailrace.router.sample import Sample
from tailrace.transfer.messages import TokenLogprob

DONE = "data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no -inf

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_SEPARATORS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def dumps(value: object) -> str:
    """Compact JSON on one line, whoever splits lines."""
    text = encode_basestring(value) if type(value) is str else _encode(value)  # the encoder's own way to it is longer
    return text if text.isascii() else text.translate(_SEPARATORS)


def error_event(failure: Failure) -> str:
    """The one event that ends a stream which failed."""
    return f"data: {dumps(error_body(failure.status, failure.message, code=failure.code))}\n\n"


def number(logprob: float) -> float:
    """A logprob as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)


@dataclass(frozen=True, slots=True)
class Reply:
    """What one HTTP request's answer says of itself, and what was asked to be in it."""

    id: str
    model: str
    created: int
    samples: int
    with_logprobs: bool
    with_token_ids: bool
    with_usage: bool  # in a stream


class Format(Protocol):
    """How chat and text completions differ. `choice`: index of the choice in the reply."""

    def opening(self, choice: int, flow: Flow) -> str:
        """Event(s) before a choice's first token."""
        ...

    def piece(self, choice: int, piece: Piece) -> str: ...

    def closing(self, choice: int, finish: str, last: Piece | None) -> str:
        """The choice's last event. `last`: the stop id's piece, which has no text."""
        ...

    def usage(self, flows: Sequence[Flow]) -> str:
        """The extra event with totals."""
        ...

    def whole(self, flows: Sequence[Flow]) -> dict[str, Any]: ...


class EventWriter:
    """Turns what has become of the samples since the last call into events."""

    def __init__(self, reply: Reply, form: Format) -> None:
        self._reply, self._form = reply, form
        self._opened: set[int] = set()
        self._closed: set[int] = set()

    def pending(self, flows: Sequence[Flow]) -> str:
        """The new events."""
        out: list[str] = []
        for number_of_flow, flow in enumerate(flows):
            for sample in flow.samples:
                choice = number_of_flow * self._reply.samples + sample.index
                if choice not in self._closed and (sample.pieces or sample.finish is not None):
                    self._sample(choice, flow, sample, out)
        return "".join(out)

    def end(self, flows: Sequence[Flow], comment: str = "") -> str:
        """What follows the last token of a stream that ended well."""
        return (self._form.usage(flows) if self._reply.with_usage else "") + comment + DONE

    def _sample(self, choice: int, flow: Flow, sample: Sample, out: list[str]) -> None:
        if choice not in self._opened:
            self._opened.add(choice)
            out.append(self._form.opening(choice, flow))
        pieces = sample.take()
        last = None
        if sample.ended_by_id and pieces and pieces[-1].token is not None and not pieces[-1].text:
            last = pieces.pop()
        for piece in pieces:
            out.append(self._form.piece(choice, piece))
        if sample.finish is not None:
            self._closed.add(choice)
            out.append(self._form.closing(choice, sample.finish, last))


def usage_of(flows: Sequence[Flow]) -> dict[str, Any]:
    """Tokens of the whole request; a prompt counts once however many samples it has."""
    prompt = sum(len(flow.spec.prompt_ids) for flow in flows)
    completion = sum(flow.completion_tokens for flow in flows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(flow.cached_tokens for flow in flows)},
    }


def chat_logprob(table: TokenTable, piece: Piece) -> list[dict[str, Any]]:
    """`content` entries of one piece: one, or none if it has no token. `bytes` of all entries together are the text."""
    if piece.token is None or piece.logprob is None:
        return []
    return [
        {
            "token": table.label(piece.token),
            "logprob": number(piece.logprob.logprob or 0.0),
            "bytes": list(piece.data),
            "top_logprobs": [
                {"token": table.label(token), "logprob": number(value), "bytes": list(table.literal(token))}
                for token, value in piece.logprob.top
            ],
        }
    ]


class TextLogprobs:
    """The `logprobs` object of text completions, for one choice; knows how far into its text it is."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._offset = 0

    def of_prompt(self, ids: Sequence[int], pieces: Sequence[str], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Entries of an echoed prompt. The first token has no logprob; a worker may leave its entry out."""
        missing = len(ids) - len(logprobs)
        found: list[TokenLogprob | None] = [None] * missing + list(logprobs)
        out = self._empty()
        for token, text, logprob in zip(ids, pieces, found, strict=True):
            self._add(out, token, text, logprob)
        return out

    def of_pieces(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        out = self._empty()
        for piece in pieces:
            if piece.token is None:
                self._offset += len(piece.text)
            else:
                self._add(out, piece.token, piece.text, piece.logprob)
        return out

    @staticmethod
    def _empty() -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(self, out: dict[str, Any], token: int, text: str, logprob: TokenLogprob | None) -> None:
        label = self._table.label(token)
        out["tokens"].append(label)
        out["text_offset"].append(self._offset)
        self._offset += len(text)
        if logprob is None or logprob.logprob is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            return
        value = number(logprob.logprob)
        out["token_logprobs"].append(value)
        top = {self._table.label(t): number(v) for t, v in logprob.top}
        top.setdefault(label, value)  # the sampled token is there even where it is not among the best
        out["top_logprobs"].append(top)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two `logprobs` objects of text completions, one after the other."""
    return {key: first[key] + second[key] for key in first}
