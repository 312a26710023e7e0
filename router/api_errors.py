"""Errors as an HTTP client sees them: the OpenAI error object, its status and its Retry-After.

Two kinds reach the HTTP layer: ClientError (model/errors.py; the request is wrong, 4xx) and RequestFailed (ours, 5xx or
a refusal for want of capacity). Knows no HTTP framework and holds no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import ValidationError

from tailrace.model.errors import ClientError, TailraceError

# messages.Fail.code -> HTTP status. What another worker would probably serve is a 503 that clients may repeat.
STATUS_OF_CODE = {
    "timeout": 504,
    "internal": 500,
    "grammar": 400,  # the client's, and too complex
    "out_of_pages": 503,
    "expired": 503,
    "transfer": 503,
    "corrupt": 503,
    "lost": 503,
    "refused": 503,
    "not_posted": 503,
}

# messages.Refused.reason, in words for the client.
REFUSALS = {
    "no_gen": "no generation worker is available",
    "no_ctx": "no context worker is available",
    "no_pair": "no context worker is paired with a generation worker",
    "too_large": "the request does not fit into any worker's page pool",
    "queue_full": "too many requests are waiting",
    "fairness": "this tenant has more than its share of the requests that wait",
    "rate": "this tenant has used up its rate of tokens",
    "deadline": "the request would not meet its timeout_s",
    "worker_deaths": "too many workers died while serving this request",
    "gen_lost": "the generation worker was lost before it took the request over",
    "bind_failed": "no generation worker could take the request over",
    "breaker_open": "the only workers for it have failed several requests and are being tried again",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without its answer. `retry_after_s` is None where repeating at once is as good as later."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of_code(cls, code: str, message: str) -> Failure:
        """The failure that a worker's Fail stands for."""
        status = STATUS_OF_CODE.get(code, 500)
        return cls(status, code, message, 1.0 if status == 503 else None)

    @classmethod
    def of_refusal(cls, status: int, reason: str, retry_after_s: float) -> Failure:
        """The failure that a router's Refused stands for."""
        code = "rate_limited" if status == 429 else "no_capacity"
        return cls(status, code, REFUSALS.get(reason, reason), retry_after_s)


class RequestFailed(TailraceError):
    """A request cannot be served for a reason that is not the client's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What goes out: status, body, extra headers."""

    status: int
    body: dict[str, object]
    headers: dict[str, str]


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The OpenAI error object."""
    return {"error": {"message": message, "type": _type_of(status), "param": param, "code": code}}


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def reply_to(error: ClientError | RequestFailed) -> ErrorReply:
    """The reply to an error that ended a request before its response began."""
    if isinstance(error, ClientError):
        body = error_body(error.status, error.message, param=error.param, code=error.code)
        return ErrorReply(error.status, body, {})
    failure = error.failure
    headers = {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(failure.retry_after_s)))
    return ErrorReply(failure.status, error_body(failure.status, failure.message, code=failure.code), headers)


def field_path(parts: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` -> `messages[0].content`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def validation_error(error: ValidationError) -> ClientError:
    """The first problem that pydantic found, as a 400 that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = field_path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        message = "must be an object"
    if param:
        message = f"{param}: {message[:1].lower()}{message[1:]}"
    return ClientError(message, param=param or None, code="invalid_value")
