"""Cross-origin requests of browsers: which web pages may call this API (`cors_origins`). Off unless origins are given.

Starlette's middleware does it; a refused preflight gets the error object like every other refusal. Holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from tailrace.router.api_errors import error_body

PREFLIGHT_S = 600  # how long a browser may remember a preflight
EXPOSED = ("x-request-id", "x-tailrace-receipt", "retry-after")


class Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        message = f"{bytes(response.body).decode()}: it is not among the origins, methods and headers allowed here"
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return JSONResponse(error_body(400, message, code="cors"), 400, headers=kept)


def cors(origins: Sequence[str]) -> list[Middleware]:
    """The middleware, none without origins. `*` stands for every origin; no cookies are ever allowed."""
    if not origins:
        return []
    return [
        Middleware(
            Cors, allow_origins=list(origins), allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"],
            expose_headers=list(EXPOSED), max_age=PREFLIGHT_S,
        )
    ]  # fmt: skip
