"""A checkpoint's chat template, rendered in Jinja's immutable sandbox with a budget. Torch-free.

A template comes with the checkpoint and its messages come from clients, so neither is trusted: no access to Python
internals, no way to spend memory or time without bound. Output equals what transformers renders for the same template.
A template that does not parse raises ConfigError; anything that goes wrong while rendering is ClientError("messages"),
as templates refuse conversations (roles that do not alternate, ...) by raising.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tailrace.model.errors import ClientError, ConfigError

MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 16_000_000
MAX_RANGE_ITEMS = 100_000  # of all ranges in one rendering together
MAX_WIDTH = 10_000  # padding, indentation and repetition that a template may ask for

_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")
_WIDE_PERCENT = re.compile(r"%[-#0 +]*(\d*\.)?\d{5,}|%[-#0 +]*(\d*\.)?\*")
_WIDE_BRACE = re.compile(r"\{[^{}]*:[^{}]*\d{5,}|\{[^{}]*:[^{}]*\{")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; in serving its body just renders."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainDict:
    """`dict(...)` for templates, without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _PlainNamespace(Namespace):
    """Jinja's namespace, refusing names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Taken out of args so that a template may say namespace(self=...).
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} starts with an underscore")


def _check_width(value: object) -> None:
    if isinstance(value, int) and not -MAX_WIDTH <= value <= MAX_WIDTH:
        raise SecurityError(f"a width of {value} is above {MAX_WIDTH}")


def _check_length(length: int) -> None:
    if length > MAX_OUTPUT_CHARS:
        raise SecurityError(f"a text of {length} characters is above {MAX_OUTPUT_CHARS}")


def _bounded_filter(inner: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            _check_width(argument)
        return inner(value, *args, **kwargs)

    return bounded


class _ConcatThroughEnvironment(CodeGenerator):
    """Compiles `a ~ b` into a call of the sandbox, which by itself only sees the other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_bounded((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, also refusing expressions whose result would be huge."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _ConcatThroughEnvironment

    def concat_bounded(self, parts: tuple[Any, ...]) -> str:
        """What `a ~ b` means."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_width(left)
            _check_width(right)
            if isinstance(right, int) and right > 64:
                raise SecurityError(f"exponent {right} is above 64")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    _check_width(len(one) * other)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("a number of more than 4096 bits")
        elif operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise SecurityError("a format width above 9999, or one that is computed")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACE.search(value.__self__):
            raise SecurityError("a format width above 9999, or one that is computed")
        return wrapped

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str) and function.__name__ in _PADDING_METHODS:
            for argument in args:
                _check_width(argument)
        return super().call(context, function, *args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class ChatTemplate:
    """A compiled template. Rendering is thread-safe: its budget lives in the call.

    Attributes:
        text: its source.
        reads_tools: it has words for tools.
    """

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        where: str = "chat template",
    ) -> None:
        """
        Args:
            text: Jinja source.
            special_tokens: `bos_token` etc. -> text, visible to the template.
            now: clock behind `strftime_now`.
            where: file, for messages.

        Raises:
            ConfigError: the source is too long or does not parse.
        """
        if len(text) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"{where}: {len(text)} characters are more than {MAX_TEMPLATE_CHARS}")
        self.text = text
        self._special_tokens = dict(special_tokens or {})
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters["tojson"] = _to_json
        for name in ("center", "indent"):
            environment.filters[name] = _bounded_filter(environment.filters[name])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["dict"] = _PlainDict()
        environment.globals["namespace"] = _PlainNamespace
        try:
            self.reads_tools = "tools" in find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
            self._template.globals = dict(
                self._template.globals
            )  # jinja's chain of dicts is slow to copy, at each call
        except (TemplateSyntaxError, RecursionError) as error:
            raise ConfigError(f"{where}: does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as one text, ready for `Tokenizer.encode(special=False)`.

        Args:
            messages: plain JSON data: role, content and what else the template reads.
            tools: JSON schemas of functions, None for none.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further template variables (`enable_thinking`, ...).

        Raises:
            ClientError: the template refuses the conversation, fails on it, or exceeds its budget.
        """
        left = MAX_RANGE_ITEMS

        def bounded_range(*bounds: int) -> range:
            nonlocal left
            items = range(*bounds)
            left -= len(items)
            if left < 0:
                raise SecurityError(f"ranges of more than {MAX_RANGE_ITEMS} items in all")
            return items

        scope = {
            "range": bounded_range,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(scope):
                size += len(part)
                if size > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters")
                parts.append(part)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise ClientError(f"the chat template refuses this conversation: {error}", param="messages") from error
        return "".join(parts)
