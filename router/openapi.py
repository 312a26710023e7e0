"""The API's description in OpenAPI 3.1, served at /openapi.json: made of the bodies that check requests.

Requests come from the pydantic bodies (api_types.py), with null allowed where it counts as absent. Answers are
described here, as loosely as they may grow: further keys may come, those named here stay. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.router.api_types import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

_REFS = "#/components/schemas/"
_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_EVENT: Schema = {  # of each event; `data` is JSON (a chunk, or an error object), at last `[DONE]`
    "type": "object", "required": ["data"], "properties": {"data": {"type": "string"}},
}  # fmt: skip
_OPTIONAL_STRING: Schema = {"type": ["string", "null"]}
_WORDS = {
    400: "The request is wrong; `param` names the field.", 401: "No valid API key.",
    404: "Not served here: a model, or a path.", 408: "The body stopped coming.",
    413: "The body is larger than `max_body_bytes`.",
    415: "The body is no JSON, or is compressed.", 429: "The tenant is above its rate or share.",
    500: "A fault of the server.", 503: "No capacity, or no worker, now.", 504: "`timeout_s` is over.",
}  # fmt: skip
_CLIENTS = (400, 401, 404, 408, 413, 415)
_WORK = (*_CLIENTS, 429, 500, 503, 504)


def describe(model_name: str, *, keys: bool, operators: bool) -> Schema:
    """The whole document.

    Args:
        keys: requests need an API key.
        operators: /metrics and /cluster are answered here too.
    """
    schemas: dict[str, Schema] = dict(_ANSWERS)
    paths = {
        "/v1/chat/completions": _post("chat", "Answer a conversation", ChatBody, "ChatCompletion", schemas, work=True),
        "/v1/completions": _post("complete", "Continue a text", CompletionBody, "Completion", schemas, work=True),
        "/tokenize": _post("tokenize", "Token ids of a text or a conversation", TokenizeBody, "Tokenized", schemas),
        "/detokenize": _post("detokenize", "Text of token ids", DetokenizeBody, "Detokenized", schemas),
        "/v1/models": _get("models", "The served model", {200: _json("Models")}, 401),
        "/v1/models/{model}": _get("model", "The served model", {200: _json("Model")}, 401, 404),
        "/health": _get("health", "This process lives", {200: _json("Health")}, open_to_all=True),
        "/ready": _get(
            "ready", "The cluster can serve", {200: _json("Readiness"), 503: _json("Readiness")}, open_to_all=True
        ),
        "/openapi.json": _get("openapi", "This document", {200: _json("Any")}, open_to_all=True),
    }
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    if operators:
        text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": _STRING}}}
        paths["/metrics"] = _get("metrics", "Metrics of the whole cluster", {200: text}, 503, open_to_all=True)
        paths["/cluster"] = _get("cluster", "Pools, pages, pairs", {200: _json("Any")}, 503, open_to_all=True)
    components: Schema = {"schemas": schemas}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": f"Tailrace: {model_name}", "version": "1"},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


# --------------------------------------------------------------------------------------------------------- operations


def _get(name: str, summary: str, answers: Mapping[int, Schema], *errors: int, open_to_all: bool = False) -> Schema:
    described = {str(status): answer for status, answer in answers.items()}
    operation: Schema = {"operationId": name, "summary": summary, "responses": _with_errors(described, errors)}
    if open_to_all:
        operation["security"] = []
    return {"get": operation}


def _post(
    name: str, summary: str, body: type[Body], answer: str, schemas: dict[str, Schema], *, work: bool = False
) -> Schema:
    good = _json(answer)
    if work:
        good["content"]["text/event-stream"] = {"schema": _EVENT}
        good["headers"] = {"x-tailrace-receipt": {"description": "If asked for; JSON.", "schema": _STRING}}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "parameters": [_header(*words) for words in _HEADERS] if work else [],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(_body_schema(body, schemas))}},
            },
            "responses": _with_errors({"200": good}, _WORK if work else _CLIENTS),
        }
    }


_HEADERS = (
    ("X-Tenant", "Who asks, where no API keys are used.", 128),
    ("X-Conversation-Id", "Turns of one conversation go where its pages are.", 256),
    ("X-Request-Id", "Given back, cleaned.", 1024),
    ("X-Tailrace-Receipt", "`1`: tell how the request was served.", 16),
)


def _header(name: str, words: str, length: int) -> Schema:
    # printable ASCII: what else a header may carry is not for documents to recommend
    schema = {"type": "string", "maxLength": length, "pattern": "^[!-~]*$"}
    return {"name": name, "in": "header", "description": words, "required": False, "schema": schema}


def _with_errors(answers: dict[str, Schema], errors: tuple[int, ...]) -> dict[str, Schema]:
    for status in errors:
        described = _json("Error", _WORDS[status])
        if status in (429, 503):
            described["headers"] = {"retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}}
        answers.setdefault(str(status), described)
    return answers


def _json(name: str, description: str = "") -> Schema:
    return {"description": description or name, "content": {"application/json": {"schema": _ref(name)}}}


def _ref(name: str) -> Schema:
    return {"$ref": _REFS + name}


# ------------------------------------------------------------------------------------------------------------- bodies


def _body_schema(body: type[Body], schemas: dict[str, Schema]) -> str:
    """Put the body's schema, and those inside it, among `schemas`; returns its name."""
    schema = body.model_json_schema(ref_template=_REFS + "{model}")
    inner = schema.pop("$defs", {})
    for name, part in {**inner, body.__name__: schema}.items():
        schemas[name] = _null_is_absent(part)
    return body.__name__


def _null_is_absent(schema: Schema) -> Schema:
    """A field that need not be there may also be null."""
    needed = schema.get("required", ())
    fields = {
        name: field if name in needed else _or_null(field) for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": fields} if fields else schema


def _or_null(field: Schema) -> Schema:
    if not field.keys() - {"title", "default", "description"}:  # anything is allowed already
        return field
    if any(one.get("type") == "null" for one in field.get("anyOf", ())):
        return field
    kept = {key: value for key, value in field.items() if key in ("title", "description")}
    rest = {key: value for key, value in field.items() if key not in kept}
    return {"anyOf": [rest, {"type": "null"}], **kept}


# ------------------------------------------------------------------------------------------------------------ answers


def _object(**fields: Schema) -> Schema:
    return {"type": "object", "required": list(fields), "properties": fields}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _one(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_USAGE = _object(
    prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)  # fmt: skip
_TEXT_CHOICE = _object(index=_COUNT, text=_STRING, logprobs={"type": ["object", "null"]}, finish_reason=_FINISH)
_MESSAGE = _object(role=_one("assistant"), content=_OPTIONAL_STRING)
_CHAT_CHOICE = _object(index=_COUNT, message=_MESSAGE, logprobs={"type": ["object", "null"]}, finish_reason=_FINISH)
_MODEL = _object(id=_STRING, object=_one("model"), created=_COUNT, owned_by=_STRING, max_model_len=_COUNT)


def _completion(kind: str, choice: Schema) -> Schema:
    choices = {**_list(choice), "minItems": 1}
    return _object(id=_STRING, object=_one(kind), created=_COUNT, model=_STRING, choices=choices, usage=_USAGE)


_ANSWERS: dict[str, Schema] = {
    "ChatCompletion": _completion("chat.completion", _CHAT_CHOICE),
    "Completion": _completion("text_completion", _TEXT_CHOICE),
    "Tokenized": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    "Detokenized": _object(prompt=_STRING),
    "Model": _MODEL,
    "Models": _object(object=_one("list"), data=_list(_MODEL)),
    "Health": _object(status=_one("ok")),
    "Readiness": _object(status=_one("ready", "degraded", "unready"), reasons=_list(_STRING)),
    "Any": {"type": "object"},
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=_OPTIONAL_STRING, code=_OPTIONAL_STRING)),
}
