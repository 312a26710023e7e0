"""The conversation trace as HTTP requests, sent when their time comes, whatever has been answered.

A trace has no text, so blocks are made that agree where the hash ids agree. Sizes are scaled down, alike for everybody,
so that two cores can carry the trace at 20x: a block of 512 trace tokens is BLOCK_IDS token ids for us, which get token
ids, and BLOCK_CHARS characters for routers that look at text; a fake worker takes the time and has the room of the
trace's tokens. What is beyond the last full block is the request's own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from simulate_trace import BLOCK, Request

BLOCK_IDS = 32
BLOCK_CHARS = 64
TOKENS_PER_ID = BLOCK // BLOCK_IDS
TOKENS_PER_CHAR = BLOCK // BLOCK_CHARS
OUTPUT_TOKENS = 2  # one of ctx, one of gen: what is asked here ends with the first token's time
_FIRST_ID, _IDS = 1000, 40000
_OWN_BLOCK = 1 << 30
DATA = b"data: {"


def block_ids(block: int) -> list[int]:
    """Token ids of a block; different blocks differ within the first three."""
    head = [_FIRST_ID + block % _IDS, _FIRST_ID + block // _IDS % _IDS, _FIRST_ID + block // _IDS**2]
    return head + [_FIRST_ID] * (BLOCK_IDS - 3)


def block_text(block: int) -> str:
    """Characters of a block."""
    return f"{block:08x}" * (BLOCK_CHARS // 8)


def prompt_ids(request: Request, number: int) -> list[int]:
    """The prompt as token ids, one for TOKENS_PER_ID tokens of the trace."""
    found = [token for block in request.blocks for token in block_ids(block)]
    rest = max(1, round(request.tokens / TOKENS_PER_ID) - len(found))
    own = [token for n in range(-(-rest // BLOCK_IDS)) for token in block_ids(_OWN_BLOCK + (number << 8) + n)]
    return found + own[:rest]


def prompt_text(request: Request, number: int) -> str:
    """The prompt as characters, one for TOKENS_PER_CHAR tokens of the trace."""
    found = "".join(map(block_text, request.blocks))
    rest = max(1, round(request.tokens / TOKENS_PER_CHAR) - len(found))
    own = "".join(block_text(_OWN_BLOCK + (number << 8) + n) for n in range(-(-rest // BLOCK_CHARS)))
    return found + own[:rest]


@dataclass(slots=True)
class Sent:
    """One request: the answer's status and, in seconds after it was due, its first token; -1 if there was none."""

    status: int = 0
    first_s: float = -1.0
    late_s: float = 0.0  # how late the client itself was


def bodies(requests: Sequence[Request], *, text: bool, model: str) -> list[bytes]:
    """Whole HTTP requests but for their first line, made before the clock starts."""
    found = []
    for number, request in enumerate(requests):
        body = json.dumps(
            {
                "model": model, "prompt": prompt_text(request, number) if text else prompt_ids(request, number),
                "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
            }
        ).encode()  # fmt: skip
        head = f"Host: bench\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        found.append(head.encode() + b"\r\n" + body)
    return found


async def open_loop(port: int, sent: Sequence[bytes], at: Sequence[float], limit_s: float = 60.0) -> list[Sent]:
    """Send each at its second; wait for the last answer, at most `limit_s` after the last was sent."""
    start = time.perf_counter() + 0.2

    async def one(body: bytes, due: float) -> Sent:
        found = Sent()
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        found.late_s = time.perf_counter() - start - due
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\n" + body)
            found.status = int((await reader.readuntil(b"\r\n")).split()[1])
            while line := await reader.readline():
                if found.first_s < 0 and line.startswith(DATA):
                    found.first_s = time.perf_counter() - start - due
        finally:
            writer.close()
        return found

    tasks = [asyncio.create_task(one(body, due)) for body, due in zip(sent, at, strict=True)]
    _, late = await asyncio.wait(tasks, timeout=max(at) + limit_s)
    for task in late:
        task.cancel()
    return [task.result() if task not in late and task.exception() is None else Sent() for task in tasks]
