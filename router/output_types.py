"""The objects in a body that say what the output must be: response_format and its kin, tools, tool choices.

Shapes only, as OpenAI has them, with what vLLM adds (`structured_outputs`, `guided_*`). What they mean stands in
grammar_spec.py and tools.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tailrace.router.body import Body

MAX_TOOLS = 128
MAX_CHOICES = 1024
_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


def _schema(value: object) -> object:
    """A schema: an object or a boolean; also as JSON text, as some clients send it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("is not valid JSON") from None
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema: an object or a boolean")
    return value


Schema = Annotated[Any, BeforeValidator(_schema)]
Pattern = Annotated[str, Field(min_length=1, max_length=65_536)]


class JsonSchemaFormat(Body):
    """`name` and `strict` change nothing: a schema is always followed to the letter."""

    name: str = Field("", max_length=256)
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchemaFormat | None = None
    regex: Pattern | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> ResponseFormat:
        if self.type in ("json_schema", "regex") and getattr(self, self.type) is None:
            raise ValueError(f"type {self.type!r} needs `{self.type}`")
        return self


class StructuredOutputs(Body):
    """vLLM's object; exactly one field."""

    json_: Schema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: Pattern | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar, json_object")
        return self


class FunctionDefinition(Body):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        fields = {"name": self.function.name, "description": self.function.description}
        fields |= {"parameters": self.function.parameters}
        return {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: object) -> object:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise ValueError(f"must be none, auto, required, or an object that names a function, not {value[:40]!r}")
    if not isinstance(value, str | dict):
        raise ValueError("must be none, auto, required, or an object that names a function")
    return value if isinstance(value, str) else NamedTool.model_validate(value)


ToolChoice = Annotated[Any, BeforeValidator(_tool_choice)]


class CalledFunction(Body):
    name: str
    arguments: Any = "{}"

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object, which templates write as JSON; what is no JSON object stays text."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    """A call in an assistant's message of the conversation so far."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.for_template()}
