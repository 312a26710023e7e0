"""The client of router.py: a process of its own, as lean as Python allows, the same for everybody that is measured.

    stdin    {"do": "http", "port": .., "path": .., "bodies": [..], "requests": 100, "clients": 8, "keep": true,
              "spread_s": 0}
             {"do": "frames", "host": .., "port": .., "boot": .., "secret": .., "leg": "local", "ids": [..],
              "requests": 100, "clients": 8, "max_tokens": 8, "spread_s": 0}
    stdout   {"seconds": .., "first": [s, ..], "gaps": [s, ..], "events": .., "wrong": .., "why": ".."}

`http` speaks HTTP/1.1 to a server, closed loop: a client sends its next request when its last answer has ended, over
the same connection (`keep`, unless the server closes it) or a new one. `frames` speaks the worker protocol to a worker,
with nothing in between: what "direct" means for ours. `first` is from before the connection is made, or the request
written, to the first event; `events` counts SSE events that carry JSON, or tokens; `gaps` are those between events.
Clients begin one after the other over `spread_s`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.links import Identity, Link, dial
from tailrace.transfer.messages import ID_BYTES, Submit, Tokens, pack_ids

EVENT = b"data: {"
LIMIT_S = 90.0
LEASE_S = 60.0


@dataclass(slots=True)
class Seen:
    """What all clients of one command saw. `at`: when each event of the request came."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    events: int = 0
    wrong: int = 0
    why: str = ""

    def note(self, sent: float, at: list[float]) -> None:
        self.events += len(at)
        if at:
            self.first.append(at[0] - sent)
            self.gaps += [b - a for a, b in zip(at, at[1:], strict=False)]

    def fault(self, why: str) -> None:
        self.wrong += 1
        self.why = self.why or why


class Connection(asyncio.Protocol):
    """One connection, one request at a time. Looks at no more of an answer than where its events and its end are."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[bool] | None = None
        self.at: list[float] = []
        self.status = 0
        self.alive = False
        self._head = bytearray()
        self._tail = b""
        self._left: int | None = None
        self._closes = False  # the answer ends with the connection
        self._last = False  # the server has said that it closes the connection after this answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.alive = cast(asyncio.Transport, transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._done(self._closes and self.status == 200)

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        """True once the whole answer is here; status, at: of it."""
        assert self.transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        self.at, self.status, self._left, self._tail, self._closes = [], 0, None, b"", False
        self._head.clear()
        self.transport.write(request)
        return self.answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data = bytes(self._head[end + 2 :])  # a chunk's line feed before its size is what `_ended` looks for
            self._read_head(bytes(self._head[:end]).lower())
            if self._left is not None:
                self._left += 2
        seen = self._tail + data
        self.at += [now] * seen.count(EVENT)
        self._tail = seen[-(len(EVENT) - 1) :]
        if self._ended(seen, len(data)):
            self._done(True)

    def _read_head(self, head: bytes) -> None:
        self.status = int(head.split(b" ", 2)[1])
        self._last = b"\r\nconnection: close" in head
        if b"transfer-encoding: chunked" not in head:
            at = head.find(b"\r\ncontent-length:")
            if at < 0:
                self._closes = True
            else:
                self._left = int(head[at + 17 :].split(b"\r\n", 1)[0])

    def _ended(self, seen: bytes, count: int) -> bool:
        if self._left is not None:
            self._left -= count
            return self._left <= 0
        return not self._closes and seen.endswith(b"\r\n0\r\n\r\n")

    def _done(self, whole: bool) -> None:
        self.alive = self.alive and not self._last
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(whole)


def request_of(path: str, body: str) -> bytes:
    data = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def http(told: dict[str, Any]) -> Seen:
    """Closed loop over HTTP."""
    seen = Seen()
    requests = [request_of(told["path"], body) for body in told["bodies"]]
    waiting = iter([requests[i % len(requests)] for i in range(told["requests"])])
    loop = asyncio.get_running_loop()

    async def client(number: int) -> None:
        connection: Connection | None = None
        await asyncio.sleep(told["spread_s"] * number / told["clients"])
        for request in waiting:
            sent = time.perf_counter()
            if connection is None or not connection.alive or not told["keep"]:
                if connection is not None and connection.transport is not None:
                    connection.transport.close()
                _, connection = await loop.create_connection(Connection, "127.0.0.1", told["port"])
            whole = await connection.ask(request)
            if not whole or connection.status != 200:
                seen.fault(f"status {connection.status}, whole {whole}, {bytes(connection._head[-300:])!r}")
            seen.note(sent, connection.at)
        if connection is not None and connection.transport is not None:
            connection.transport.close()

    await asyncio.gather(*(client(i) for i in range(told["clients"])))
    return seen


@dataclass(slots=True)
class _Asked:
    sent: float
    done: asyncio.Future[None]
    at: list[float] = field(default_factory=list)


async def frames(told: dict[str, Any]) -> Seen:
    """Closed loop to a worker, over one link as an ingress has it."""
    seen, asked = Seen(), dict[str, _Asked]()
    loop = asyncio.get_running_loop()

    def on_frame(link: Link, frame: object) -> None:
        now = time.perf_counter()
        for delta in frame.deltas if isinstance(frame, Tokens) else ():
            one = asked[delta.request]
            one.at += [now] * (len(delta.ids) // ID_BYTES)
            if delta.finish is not None:
                one.done.set_result(None)

    me = Identity("ingress", "bench", secrets.token_hex(8))
    link = await dial(
        told["host"], told["port"], me, told["secret"].encode(), on_frame=on_frame,
        on_close=lambda link, reason: None, expect_boot=told["boot"],
    )  # fmt: skip
    params = SamplingParams(max_tokens=told["max_tokens"], temperature=0.0, ignore_eos=True)
    prompt = pack_ids(told["ids"])
    left = iter(range(told["requests"]))

    async def client(number: int) -> None:
        await asyncio.sleep(told["spread_s"] * number / told["clients"])
        for _ in left:
            request = secrets.token_hex(16)
            one = asked[request] = _Asked(time.perf_counter(), loop.create_future())
            link.send(Submit(request, 1, told["leg"], prompt, b"", params, 1, b"", b"", 0, LEASE_S, None, False))
            await one.done
            seen.note(one.sent, asked.pop(request).at)

    await asyncio.gather(*(client(i) for i in range(told["clients"])))
    link.close()
    return seen


async def answer(told: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S):
            seen = await (http if told["do"] == "http" else frames)(told)
    except (TimeoutError, OSError) as error:
        seen = Seen(wrong=told["requests"], why=f"{type(error).__name__} {error}")
    return {
        "seconds": time.perf_counter() - start, "first": seen.first, "gaps": seen.gaps, "events": seen.events,
        "wrong": seen.wrong, "why": seen.why,
    }  # fmt: skip


async def run() -> None:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        sys.stdout.write(json.dumps(await answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(run())
