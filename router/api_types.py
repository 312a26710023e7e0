"""Request bodies of the HTTP API, checked by pydantic: types, bounds, and what this release does not have yet.

Rules that hold for every body: a field that is null counts as absent; unknown fields are ignored, so they can never
reach a worker; numbers are numbers (`"5"` is refused, an integer passes where a float is asked for, NaN and infinities
are refused). What depends on the model or the cluster (vocabulary, longest request) is checked in `sampling.py` and
`tokenization.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BeforeValidator, Field, ValidationError

from tailrace.model.errors import ClientError
from tailrace.model.sampling_params import MAX_LOGPROBS
from tailrace.router.api_errors import validation_error
from tailrace.router.body import Body
from tailrace.router.output_types import (
    MAX_TOOLS,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolChoice,
)

MAX_SAMPLES = 128
MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024  # of one stop string
MAX_STOP_IDS = 1024
MAX_LOGIT_BIAS = 4096
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1

_ROLES = ("system", "developer", "user", "assistant", "tool")
_Prompt = str | list[int]


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], data: bytes) -> B:
    """The body as `kind`; raises ClientError (400) naming the field."""
    try:
        value = pydantic_core.from_json(data)
    except ValueError as error:
        raise ClientError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ClientError(f"the body must be a JSON object, not {_json_type(value)}", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error) from None


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


# ------------------------------------------------------------------------------------------------------ field checks


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or an array of strings")
    if "" in strings:
        raise ValueError("a stop string must not be empty")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, not {len(strings)}")
    longest = max((len(s.encode()) for s in strings), default=0)
    if longest > MAX_STOP_BYTES:
        raise ValueError(f"a stop string has at most {MAX_STOP_BYTES} bytes, not {longest}")
    return tuple(dict.fromkeys(strings))


def _ids(value: object) -> list[int]:
    """An array of integers; whether they are in the vocabulary is checked where the vocabulary is known."""
    if not isinstance(value, list):
        raise ValueError("must be an array of token ids")
    for item in value:
        if type(item) is not int:
            raise ValueError(f"a token id must be an integer, not {_json_type(item)}")
    return value


def _prompts(value: object) -> list[_Prompt]:
    """One prompt or a batch, as a list of texts and lists of ids."""
    if isinstance(value, str):
        return [_prompt_text(value)]
    if not isinstance(value, list):
        raise ValueError("must be a string, an array of strings, an array of token ids, or an array of such arrays")
    if not value:
        raise ValueError("must not be empty")
    if type(value[0]) is int:
        return [_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts a request, not {len(value)}")
    if all(isinstance(item, str) for item in value):
        return [_prompt_text(item) for item in value]
    if all(isinstance(item, list) for item in value):
        if not all(value):
            raise ValueError("a prompt must have at least one token")
        return [_ids(item) for item in value]
    raise ValueError("the prompts of a batch must be all strings or all arrays of token ids")


def _prompt_text(text: str) -> str:
    if not text:
        raise ValueError("a prompt must have at least one token")
    return text


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    pairs = []
    for key, number in value.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise ValueError(f"{key[:40]!r} is no token id")
        if type(number) not in (int, float) or not -100 <= number <= 100:  # NaN fails the comparison
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        pairs.append((int(key), float(number)))
    return tuple(pairs)


def _top_k(value: object) -> object:
    return 0 if value == -1 and type(value) is int else value  # -1 is a common way to say "off"


def _content(value: object) -> str:
    """Message text: a string, or the text parts of an array joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of content parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("a content part must be an object with a `type`")
        if kind != "text":
            raise ValueError(f"content parts of type {kind[:40]!r} are not supported; this model reads text only")
        text = part.get("text")
        if not isinstance(text, str):
            raise ValueError("a text part needs a string `text`")
        texts.append(text)
    return "".join(texts)


def _role(value: object) -> object:
    if isinstance(value, str) and value not in _ROLES:
        raise ValueError(f"must be one of {', '.join(_ROLES)}, not {value[:40]!r}")
    return value


def _not_available(value: object) -> object:
    if value not in ([], {}):
        raise ValueError("not available yet")
    return value


def _replaced(value: object) -> object:
    if value not in ([], {}, "none"):
        raise ValueError("not supported; `tools` and `tool_choice` have replaced it")
    return value


Replaced = Annotated[Any, BeforeValidator(_replaced)]
# What is read of these is described for /openapi.json by the types beside their checks.
_StopText = Annotated[str, Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_IdList = Annotated[list[_Id], Field(min_length=1)]
_Batch = Annotated[list[_Text] | list[_IdList], Field(min_length=1, max_length=MAX_PROMPTS)]
_StopInput = _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOP_STRINGS)]
_IdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_BiasInput = Annotated[dict[_IdText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)]

Stop = Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=_StopInput)]
Ids = Annotated[Any, BeforeValidator(_ids, json_schema_input_type=list[_Id])]
Prompts = Annotated[Any, BeforeValidator(_prompts, json_schema_input_type=_Text | _IdList | _Batch)]
Bias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_bias, json_schema_input_type=_BiasInput)]
Role = Annotated[str, BeforeValidator(_role, json_schema_input_type=Literal[_ROLES])]

# -------------------------------------------------------------------------------------------------------------- bodies


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """What chat and text completions share. Defaults are OpenAI's; `max_tokens` unset is the room left."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, BeforeValidator(_top_k)] = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Bias = ()
    seed: int | None = Field(None, ge=SEED_MIN, le=SEED_MAX)
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    stop: Stop = ()
    stop_token_ids: Ids = Field(default_factory=list, max_length=MAX_STOP_IDS)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=256)
    timeout_s: float | None = Field(None, gt=0, le=86_400)
    conversation_id: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = None
    return_token_ids: bool = False
    receipt: bool = False


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. `developer` is what newer clients call `system`."""

    role: Role
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class ChatBody(SamplingBody):
    messages: list[Message] = Field(min_length=1, max_length=65_536)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    functions: Replaced = None
    function_call: Replaced = None


class CompletionBody(SamplingBody):
    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    suffix: Annotated[Any, BeforeValidator(lambda v: v if v == "" else _not_available(v))] = None


class TokenizeBody(Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=65_536)
    add_special_tokens: bool = True
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Ids
