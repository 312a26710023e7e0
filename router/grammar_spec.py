"""What a body asks of its output's form, as the grammar text that travels to the workers.

    response_format | structured_outputs | guided_json .. guided_grammar     one of them at most
        -> GrammarSpec(text, param): bounded here, on the event loop -> GrammarCheck: compiled once, in a thread

so that a wrong schema or pattern is a 400 that names the field, never a worker's fault. Keywords that the library does
not know are refused by name; nothing is silently left out. Knows no HTTP and no worker.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailrace.model.errors import ClientError
from tailrace.model.grammar_text import MAX_DEPTH, MAX_GRAMMAR_BYTES, grammar_text, why_unusable

if TYPE_CHECKING:
    from tailrace.router.api_types import SamplingBody

MAX_CHECKED = 256
MAX_CHECKED_BYTES = 4 << 20

RunJob = Callable[[Callable[[], str | None], int], Awaitable[str | None]]
"""Tokenization.run: a job and about how long it is in characters."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`text`: as SamplingParams.grammar; `param`: the field it came from."""

    text: str
    param: str


def grammar_spec(body: SamplingBody) -> GrammarSpec | None:
    """What the body asks for, None for any output; raises ClientError if it asks twice or for too much."""
    specs = [spec for spec in (_response_format(body), _structured_outputs(body), *_guided(body)) if spec is not None]
    if len(specs) > 1:
        raise ClientError(
            f"{specs[1].param}: not together with {specs[0].param}", param=specs[1].param, code="invalid_value"
        )
    return specs[0] if specs else None


def schema_spec(schema: Any, param: str) -> GrammarSpec:
    """Of a JSON schema, which must not be nested too deep."""
    if depth_of(schema) > MAX_DEPTH:
        raise ClientError(f"{param}: nested deeper than {MAX_DEPTH} levels", param=param, code="invalid_value")
    return bounded(grammar_text("json_schema", schema), param)


def bounded(text: str, param: str, limit: int = MAX_GRAMMAR_BYTES) -> GrammarSpec:
    """Raises ClientError if the text is longer than workers take."""
    size = len(text.encode())
    if size > limit:
        raise ClientError(f"{param}: {size} bytes are more than {limit}", param=param, code="invalid_value")
    return GrammarSpec(text, param)


def choice_lark(choices: list[str]) -> str:
    """Lark of one of some texts."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def depth_of(value: object) -> int:
    """Levels of brackets, counted without recursion."""
    deepest, level = 0, [value]
    while level := [x for x in level if isinstance(x, dict | list) and x]:
        deepest += 1
        level = [inner for x in level for inner in (x.values() if isinstance(x, dict) else x)]
        if deepest > MAX_DEPTH:
            break
    return deepest


def _response_format(body: SamplingBody) -> GrammarSpec | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_schema" and asked.json_schema is not None:
        return schema_spec(asked.json_schema.schema_, "response_format.json_schema.schema")
    if asked.type == "regex":
        return bounded(grammar_text("regex", asked.regex), "response_format.regex")
    return GrammarSpec(grammar_text("json_object"), "response_format")


def _structured_outputs(body: SamplingBody) -> GrammarSpec | None:
    asked = body.structured_outputs
    if asked is None:
        return None
    if asked.json_object:
        return GrammarSpec(grammar_text("json_object"), "structured_outputs")
    return _one_of("structured_outputs.", asked.json_, asked.regex, asked.choice, asked.grammar)


def _guided(body: SamplingBody) -> list[GrammarSpec | None]:
    return [
        _one_of("guided_", body.guided_json, None, None, None),
        _one_of("guided_", None, body.guided_regex, None, None),
        _one_of("guided_", None, None, body.guided_choice, None),
        _one_of("guided_", None, None, None, body.guided_grammar),
    ]


def _one_of(
    prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> GrammarSpec | None:
    if schema is not None:
        return schema_spec(schema, f"{prefix}json")
    if regex is not None:
        return bounded(grammar_text("regex", regex), f"{prefix}regex")
    if choice is not None:
        return bounded(grammar_text("lark", choice_lark(choice)), f"{prefix}choice")
    return None if grammar is None else bounded(grammar_text("lark", grammar), f"{prefix}grammar")


class GrammarCheck:
    """Compiles each grammar once and remembers which were fine, and what was wrong with those that were not.

    Args:
        run: runs a job in a thread, off the event loop.
    """

    def __init__(self, run: RunJob) -> None:
        self._run = run
        self._known: OrderedDict[str, str | None] = OrderedDict()
        self._num_bytes = 0

    async def why_unusable(self, text: str) -> str | None:
        """What is wrong with a grammar text, in one line; None if it can be followed."""
        if text in self._known:
            self._known.move_to_end(text)
            return self._known[text]
        why = await self._run(lambda: why_unusable(text), len(text))
        why = None if why is None else " ".join(why.split())[:400]
        if text not in self._known:
            self._known[text] = why
            self._num_bytes += len(text)
        while len(self._known) > MAX_CHECKED or self._num_bytes > MAX_CHECKED_BYTES:
            gone, _ = self._known.popitem(last=False)
            self._num_bytes -= len(gone)
        return why

    async def check(self, spec: GrammarSpec) -> None:
        """Raises ClientError (400) naming the field if it cannot be followed."""
        why = await self.why_unusable(spec.text)
        if why is not None:
            raise ClientError(f"{spec.param}: cannot be followed: {why}", param=spec.param, code="invalid_grammar")
