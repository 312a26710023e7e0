"""Tools of a chat request: what the template is told, what the output is bound to, and the calls in the answer.

    tools, tool_choice -> ToolPlan -> the prompt: through the template, or in our own words where it knows no tools
                                   -> a grammar, where a call is demanded (required, or a function by name)
                                   -> ToolStream: the calls in the output (tool_calls.py)

`ToolSupport` knows the model's dialect; a plan belongs to one request. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.model.errors import ClientError
from tailrace.model.grammar_text import MAX_DEPTH, grammar_text, regex_rule, with_options
from tailrace.router.api_types import ChatBody
from tailrace.router.detokenize import TokenTable
from tailrace.router.grammar_spec import GrammarSpec, bounded, depth_of
from tailrace.router.output_types import NamedTool, Tool
from tailrace.router.tool_calls import DIALECTS, Dialect, ToolStream, dialect_of

MAX_TOOLS_BYTES = 262_144
TOOL_PARSERS = ("auto", *DIALECTS)

_PREFACE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_MANNER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What one request may and must call.

    Attributes:
        tools: those that the model is told of; none if it shall call none.
        demanded: a call must come; `only`: of this function.
        parallel: several may.
    """

    tools: tuple[Tool, ...]
    demanded: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)


def tool_plan(body: ChatBody) -> ToolPlan | None:
    """The body's plan, None if calls are no matter of it; raises ClientError naming the field."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "needs tools")
        return None
    names = [tool.function.name for tool in body.tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _wrong(f"tools[{i}].function.name", f"{name!r} stands twice")
        if depth_of(body.tools[i].function.parameters) > MAX_DEPTH:
            raise _wrong(f"tools[{i}].function.parameters", f"nested deeper than {MAX_DEPTH} levels")
    only = choice.function.name if isinstance(choice, NamedTool) else None
    if only is not None and only not in names:
        raise _wrong("tool_choice.function.name", f"{only[:80]!r} is none of the tools")
    if choice == "none":
        return None
    return ToolPlan(tuple(body.tools), choice == "required" or only is not None, only, body.parallel_tool_calls)


def _wrong(param: str, what: str) -> ClientError:
    return ClientError(f"{param}: {what}", param=param, code="invalid_value")


class ToolSupport:
    """How the served model is told of tools and how it calls them.

    Args:
        template: the chat template's source, None if there is none.
        template_knows: it reads `tools`.
        parser: of TOOL_PARSERS. A template that knows no tools always goes with hermes, whose form our words teach.
    """

    def __init__(self, template: str | None, template_knows: bool, table: TokenTable, parser: str = "auto") -> None:
        self.template_knows = template_knows
        if not template_knows:
            self.dialect: Dialect = DIALECTS["hermes"]
        else:
            self.dialect = dialect_of(template) if parser == "auto" else DIALECTS[parser]
        # A marker that is a special token has no text; here it counts as what it spells.
        self.marks = {t: s for t in table.special if (s := table.literal(t).decode(errors="replace")) in self._special}

    @property
    def _special(self) -> tuple[str, ...]:
        return (self.dialect.marker, self.dialect.ending)

    def stream(self, plan: ToolPlan, *, eager: bool) -> ToolStream:
        return ToolStream(self.dialect, plan.names, parallel=plan.parallel, eager=eager)

    # ---------------------------------------------------------------------------------------------------------- prompt

    def messages(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as the template takes it: as it is, or with all that concerns tools put into words."""
        if self.template_knows or not (tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)):
            return messages
        out: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "tool":
                said = f"<tool_response>\n{message['content']}\n</tool_response>"
                if out and out[-1].get("role") == "user" and out[-1]["content"].endswith("</tool_response>"):
                    out[-1] = {"role": "user", "content": f"{out[-1]['content']}\n{said}"}
                else:
                    out.append({"role": "user", "content": said})
            elif "tool_calls" in message:
                calls = [_in_words(call["function"]) for call in message["tool_calls"]]
                text = "\n".join([*([message["content"]] if message["content"] else []), *calls])
                out.append({**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text})
            else:
                out.append(message)
        return [*_with_preface(out, tools)] if tools else out

    # --------------------------------------------------------------------------------------------------------- grammar

    def grammar(self, plan: ToolPlan, answer: GrammarSpec | None) -> GrammarSpec | None:
        """What binds the output: to calls where they are demanded; else to `answer`, or calls, if there is an answer
        to be bound to; else None."""
        if not plan.demanded and answer is None:
            return None
        tools = [tool for tool in plan.tools if plan.only in (None, tool.function.name)]
        several = plan.parallel and plan.only is None
        rules = self._calls(tools, several)
        if plan.demanded or answer is None:
            return bounded(grammar_text("lark", "\n".join(["start: calls", *rules])), "tools", MAX_TOOLS_BYTES)
        rules = ["start: calls | answer", *rules, f"answer: {_rule_of(answer)}"]
        return bounded(grammar_text("lark", "\n".join(rules)), answer.param, MAX_TOOLS_BYTES)

    def alone(self, plan: ToolPlan) -> list[GrammarSpec]:
        """The grammar of each tool's arguments, to find the one that cannot be followed."""
        return [
            GrammarSpec(grammar_text("json_schema", _arguments(tool)), f"tools[{i}].function.parameters")
            for i, tool in enumerate(plan.tools)
        ]

    def _calls(self, tools: Sequence[Tool], several: bool) -> list[str]:
        """Lark rules of `calls`."""
        dialect = self.dialect
        marker, ending = self._mark(dialect.marker), self._mark(dialect.ending) if dialect.ending else ""
        key = dialect.argument_keys[0]
        if dialect.name == "hermes":
            one = f'{marker} "\\n" object "\\n" {ending}'
            rules = ['calls: call ("\\n" call)*' if several else "calls: call", f"call: {one}"]
        elif dialect.name == "mistral":
            rest = ' (", " object)*' if several else ""
            rules = [f'calls: {marker} "[" object{rest} "]"']
        else:
            rules = ['calls: object ("; " object)*' if several else "calls: object"]
        rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(tools))))
        for i, tool in enumerate(tools):
            head = json.dumps(f'{{"name": "{tool.function.name}", "{key}": ')
            rules.append(f'object_{i}: {head} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: %json {json.dumps(with_options(_arguments(tool)))}")
        return rules

    def _mark(self, text: str) -> str:
        """A marker in Lark: its token where it is special, else what it spells."""
        token = next((token for token, spelled in self.marks.items() if spelled == text), None)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _arguments(tool: Tool) -> dict[str, Any]:
    """Schema of a function's arguments. Without parameters it takes none; where the schema lists properties and does
    not say whether others may come, they may not."""
    schema = tool.function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in schema and "additionalProperties" not in schema:
        return {**schema, "additionalProperties": False}
    return schema


def _rule_of(answer: GrammarSpec) -> str:
    """The body of a Lark rule for an answer's grammar."""
    fields = json.loads(answer.text)
    if fields["kind"] == "json_object":
        return f"%json {json.dumps(with_options({'type': 'object'}))}"
    if fields["kind"] == "json_schema":
        return f"%json {json.dumps(with_options(fields['value']))}"
    if fields["kind"] == "regex":
        return regex_rule(fields["value"])
    raise _wrong(answer.param, "not together with tools")


def _in_words(function: dict[str, Any]) -> str:
    written = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


def _with_preface(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools at the end of the system message, which is made if there is none."""
    lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    words = f"{_PREFACE}{lines}{_MANNER}"
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{words}"}, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]
