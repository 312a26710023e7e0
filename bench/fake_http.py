"""A trivial worker that speaks the OpenAI API over HTTP: what the peers of router.py route to. It answers tokens, at
once or at a rate, and does nothing else.

    python bench/fake_http.py           ->  {"ready": true, "port": ..}
    stdin  {"token_s": 0.02}            seconds between tokens from now on; null (as at first): all at once

One process, written on bare asyncio so that it costs little beside what is measured. Output is the same word max_tokens
times. GET paths that routers probe all answer 200.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import cast

import uvloop

WORD = " token"
FULL_BYTES = 1 << 16
HELD_BACK_S = 0.0005
_HEAD = '{"id":"cmpl-0","object":"chat.completion.chunk","created":1,"model":"fake","choices":[{"index":0,'


def _chunk(data: str) -> bytes:
    return f"{len(data):x}\r\n{data}\r\n".encode()


def _json(body: object, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = _chunk(f'data: {_HEAD}"delta":{{"content":{json.dumps(WORD)}}},"logprobs":null,"finish_reason":null}}]}}\n\n')
_LAST = _chunk(f'data: {_HEAD}"delta":{{}},"logprobs":null,"finish_reason":"length"}}]}}\n\n')
_END = _chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
_PROBED = _json(
    {
        "object": "list",
        "data": [{"id": "fake", "object": "model"}],
        "status": "ok",
        "model_path": "fake",
        "served_model_name": "fake",
        "tokenizer_path": "fake",
        "is_generation": True,
        "version": "0",
    }  # fmt: skip
)


@dataclass(slots=True)
class Pace:
    """`token_s`: seconds between tokens of a stream, 0: as fast as they are taken; None: at once."""

    token_s: float | None = None


class Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            length, expects = _length(head), b"expect: 100-continue" in head
            if len(self._buffer) < end + 4 + length:
                if expects and len(self._buffer) == end + 4 and self._transport is not None:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not head.startswith(b"post"):
            self._transport.write(_PROBED)
            return
        asked = json.loads(body)
        count = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 8)
        if not asked.get("stream"):
            message = {"role": "assistant", "content": WORD * count}
            choice = {"index": 0, "message": message, "text": WORD * count, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            self._transport.write(_json({"id": "cmpl-0", "model": "fake", "choices": [choice], "usage": usage}))
        elif self._pace.token_s is None:
            self._transport.write(_STREAM + _TOKEN * count + _LAST + _END)
        else:
            self._stream = asyncio.create_task(self._tokens(count, self._pace.token_s))

    async def _tokens(self, count: int, token_s: float) -> None:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._transport.write(_STREAM + _TOKEN)
        for i in range(1, count):
            await asyncio.sleep(max(0.0, start + i * token_s - loop.time()))
            while self._transport.get_write_buffer_size() > FULL_BYTES:
                await asyncio.sleep(HELD_BACK_S)
            self._transport.write(_TOKEN)
        self._transport.write(_LAST + _END)


def _length(head: bytes) -> int:
    at = head.find(b"\r\ncontent-length:")
    return int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def run() -> None:
    pace, loop = Pace(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(pace), "127.0.0.1", 0, backlog=512)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say(ready=True, port=server.sockets[0].getsockname()[1])
    while line := await lines.readline():
        pace.token_s = json.loads(line)["token_s"]
        _say(done=True)


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(run())
