"""One HTTP exchange: its head, its body within bounds, who asks, and the reply. Knows nothing of completions.

Replies carry `X-Request-Id`: the client's own, cleaned, or a new one. It is for people who read logs; inside the
cluster requests have ids of their own that no client can choose.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping

from tailrace.model.errors import ClientError
from tailrace.router.formats import dumps
from tailrace.router.sse import Headers, Receive, Send

MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 128
TENANT_DIGITS = 12
MAX_CONVERSATION_CHARS = 256
BODY_PART_S = 30.0  # a body may take long, but something of it has to come
DRAIN_S = 5.0
DRAIN_FACTOR = 8  # a body too large is read and dropped up to this many times the bound, so that the client hears why

_FORM_SAFE = frozenset(chr(c) for c in range(0x21, 0x7F))


class ClientGone(Exception):
    """The client closed its side while its request was still being read."""


class Keys:
    """The accepted bearer keys, as digests: a look-up then takes no time that depends on a key.

    Args:
        keys: key -> its tenant's name; empty: the key is a tenant of its own, named by a few digits of its digest, for
            names of tenants are logged and shown.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._tenants: dict[bytes, str] = {}
        for key, tenant in keys.items():
            digest = hashlib.sha256(key.encode()).digest()
            self._tenants[digest] = tenant or f"key-{digest.hex()[:TENANT_DIGITS]}"

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: str) -> str:
        """The tenant of an Authorization header; raises ClientError (401)."""
        scheme, _, token = authorization.partition(" ")
        tenant = self._tenants.get(hashlib.sha256(token.strip().encode()).digest())
        if scheme.lower() != "bearer" or tenant is None:
            raise ClientError(
                "a valid API key is needed in the Authorization header", status=401, code="invalid_api_key"
            )
        return tenant


class Head:
    """The request's headers, read with care: each value is text of bounded length."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._values = {name.lower(): value for name, value in headers}
        self.request_id = self._cleaned(b"x-request-id") or secrets.token_hex(16)

    def text(self, name: bytes) -> str:
        """A header's value as text, empty if it is absent."""
        return self._values.get(name, b"").decode(errors="replace").strip()

    def _cleaned(self, name: bytes) -> str:
        return "".join(c for c in self.text(name)[: 4 * MAX_ID_CHARS] if c in _FORM_SAFE)[:MAX_ID_CHARS]

    def tenant(self, keys: Keys) -> str:
        """Who asks: the key's tenant where keys are on, else X-Tenant. Raises ClientError (401, 400)."""
        if keys:
            return keys.tenant_of(self.text(b"authorization"))
        tenant = self.text(b"x-tenant")
        if len(tenant) > MAX_TENANT_CHARS:
            raise ClientError(f"X-Tenant has at most {MAX_TENANT_CHARS} characters", param="X-Tenant")
        return tenant

    def conversation(self) -> str | None:
        value = self.text(b"x-conversation-id")
        if len(value) > MAX_CONVERSATION_CHARS:
            message = f"X-Conversation-Id has at most {MAX_CONVERSATION_CHARS} characters"
            raise ClientError(message, param="X-Conversation-Id")
        return value or None

    @property
    def wants_receipt(self) -> bool:
        return self.text(b"x-tailrace-receipt").lower() not in ("", "0", "false", "no")

    def check_json(self) -> None:
        """Raise ClientError (415) unless the body is JSON as it stands. No content type at all is taken as JSON."""
        kind = self.text(b"content-type").partition(";")[0].strip().lower()
        if kind and kind != "application/json":
            raise ClientError(f"content type {kind[:80]!r} is not application/json", status=415)
        encoding = self.text(b"content-encoding").lower()
        if encoding not in ("", "identity"):
            raise ClientError(f"content encoding {encoding[:80]!r} is not supported", status=415)

    def declared_length(self) -> int:
        value = self.text(b"content-length")
        return int(value) if value.isascii() and value.isdigit() else 0


async def read_body(head: Head, receive: Receive, max_bytes: int) -> bytes:
    """The body. Raises ClientError (408, 413, 415), ClientGone."""
    head.check_json()
    parts: list[bytes] = []
    size = 0
    too_large = head.declared_length() > max_bytes
    while not too_large:
        part, more = await _next_part(receive)
        size += len(part)
        too_large = size > max_bytes
        parts.append(part)
        if not more and not too_large:
            return b"".join(parts)
    parts.clear()
    await _drain(receive, DRAIN_FACTOR * max_bytes)
    raise ClientError(f"the body is larger than {max_bytes} bytes", status=413)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    try:
        async with asyncio.timeout(BODY_PART_S):
            message = await receive()
    except TimeoutError:
        raise ClientError(f"nothing of the body came for {BODY_PART_S:g} seconds", status=408) from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def _drain(receive: Receive, max_bytes: int) -> None:
    """Read on for a while: a client that is still sending does not look at an answer."""
    try:
        async with asyncio.timeout(DRAIN_S):
            more = True
            while more and max_bytes > 0:
                part, more = await _next_part(receive)
                max_bytes -= len(part)
    except (TimeoutError, ClientError):
        return


async def send_json(
    send: Send, status: int, body: Mapping[str, object], headers: Headers, *, extra: Mapping[str, str] | None = None
) -> None:
    """A whole reply of JSON."""
    await send_bytes(send, status, dumps(body).encode(), "application/json", headers, extra=extra)


async def send_bytes(
    send: Send, status: int, data: bytes, kind: str, headers: Headers, *, extra: Mapping[str, str] | None = None
) -> None:
    """A whole reply."""
    more = [(name.encode(), value.encode()) for name, value in (extra or {}).items()]
    own = [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": own + headers + more})
    await send({"type": "http.response.body", "body": data, "more_body": False})
