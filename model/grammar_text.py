"""A constrained output in words: what a request carries, and what the grammar library (llguidance) makes of it.

    {"kind": "json_object"}                      any JSON object
    {"kind": "json_schema", "value": SCHEMA}     JSON that the schema accepts
    {"kind": "regex", "value": TEXT}             the whole output matches
    {"kind": "lark", "value": TEXT}              llguidance's dialect of Lark

as JSON text, because that is all that travels (SamplingParams.grammar); every process that samples compiles it anew
(engine/grammar.py), and the ingress only checks it. White space in JSON is free but bounded: at most MAX_BLANKS in a
row, so that no model fills its output with it.

Pure, torch-free, thread-safe; the library lets go of the interpreter while it checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark

KINDS = ("json_object", "json_schema", "regex", "lark")
MAX_GRAMMAR_BYTES = 65_536  # of the JSON text; compiling takes up to a second then, and is no part of any pass
MAX_DEPTH = 64  # of brackets in a schema; the library's own parser ends near 128
MAX_BLANKS = 20
LIMITS = LLParserLimits(verbose_errors=False)

# `oneOf` is followed as `anyOf` where the library cannot show that its branches exclude each other. The branches of
# discriminated unions, which are written so, do.
_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ \n]{{0,{MAX_BLANKS}}}",
    "coerce_one_of": True,
}


def grammar_text(kind: str, value: object = None) -> str:
    """The text that travels; equal meaning gives equal text where the client's JSON was equal."""
    fields = {"kind": kind} if value is None else {"kind": kind, "value": value}
    return json.dumps(fields, separators=(",", ":"))


def with_options(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema with our white space, ready for `%json` in a Lark grammar or for the library's JSON compiler."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}  # the library refuses the latter: nothing satisfies it
    return {**schema, "x-guidance": _OPTIONS}


def regex_rule(pattern: str) -> str:
    """A pattern as the body of a Lark rule."""
    return f"/{regex_to_lark(pattern)}/"


def library_grammar(text: str) -> str:
    """What the library compiles for a grammar text; raises ValueError if the text is none of ours."""
    fields = json.loads(text)
    kind = fields.get("kind") if isinstance(fields, dict) else None
    value = fields.get("value") if isinstance(fields, dict) else None
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema(json.dumps(with_options({"type": "object"})))
    if kind == "json_schema" and isinstance(value, dict | bool):
        return LLMatcher.grammar_from_json_schema(json.dumps(with_options(value)))
    if kind == "regex" and isinstance(value, str):
        return LLMatcher.grammar_from_regex(value)
    if kind == "lark" and isinstance(value, str):
        return LLMatcher.grammar_from_lark(value)
    raise ValueError(f"no grammar of kind {kind!r}")


def why_unusable(text: str) -> str | None:
    """What is wrong with a grammar text, in the library's words, or None. Takes milliseconds, up to a second for a
    grammar of the greatest size."""
    try:
        return LLMatcher.validate_grammar(library_grammar(text), None, limits=LIMITS) or None
    except ValueError as error:
        return str(error)
