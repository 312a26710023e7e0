"""A lean closed-loop HTTP client. It shares the machine with what it measures, so it only keeps lines while it runs.

    asyncio.run(closed_loop(port, bodies, clients=8)) -> one Answer a body, in their order

A client sends its next request when its last answer has ended, on a new connection. Streaming answers only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Answer:
    """One streamed completion. `events`: (clock reading, raw SSE data); `sent`: clock reading before the request."""

    status: int
    sent: float
    events: list[tuple[float, bytes]] = field(default_factory=list)

    def tokens(self) -> list[tuple[float, list[int]]]:
        """(seconds since it was sent, ids) of each event that carries tokens."""
        found = []
        for at, data in self.events:
            for choice in json.loads(data).get("choices", ()):
                if choice.get("token_ids"):
                    found.append((at - self.sent, choice["token_ids"]))
        return found

    @property
    def ids(self) -> list[int]:
        return [token for _, ids in self.tokens() for token in ids]


def completion(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    """The body of a greedy streaming completion of exactly that many tokens."""
    return {
        "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


async def closed_loop(port: int, bodies: Sequence[Mapping[str, object]], clients: int) -> list[Answer]:
    """Send all bodies with that many clients."""
    waiting = deque(enumerate(json.dumps(body).encode() for body in bodies))
    answers: dict[int, Answer] = {}
    await asyncio.gather(*(_client(port, waiting, answers) for _ in range(clients)))
    return [answers[i] for i in range(len(bodies))]


async def _client(port: int, waiting: deque[tuple[int, bytes]], answers: dict[int, Answer]) -> None:
    while waiting:
        number, body = waiting.popleft()
        answers[number] = await _ask(port, body)


async def _ask(port: int, body: bytes) -> Answer:
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        answer = Answer(int((await reader.readuntil(b"\r\n")).split()[1]), sent)
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                answer.events.append((time.perf_counter(), line[6:]))
        return answer
    finally:
        writer.close()
