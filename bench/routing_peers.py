"""Fake HTTP workers for routers that are not ours, and vllm-router in front of them.

    python bench/routing_peers.py --prefill 4 --decode 2 --rate 200000 --cache-blocks 8000
    stdin    {"do": "counts"}   {"do": "stop"}
    stdout   {"prefill": [ports], "decode": [ports]}, then one line an answer

The prefill workers are those of fake_workers.py in all that counts: first in, first out, a rate, an LRU of blocks that
a prompt enters when its turn comes; the decode workers answer at once. Prompts are text as routing_load.py makes it,
eight hexadecimal digits a token id for /tokenize, which vllm-router asks before it looks for prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from routing_load import BLOCK_CHARS, TOKENS_PER_CHAR

READY_S = 60.0


@dataclass(slots=True)
class Counts:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Prefill:
    """One worker's queue and cache."""

    rate: float
    capacity: int
    counts: Counts = field(default_factory=Counts)
    cache: OrderedDict[str, None] = field(default_factory=OrderedDict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(self, prompt: str) -> None:
        """Returns when the prompt is computed."""
        async with self.turn:
            blocks = [prompt[i : i + BLOCK_CHARS] for i in range(0, len(prompt) - BLOCK_CHARS + 1, BLOCK_CHARS)]
            hits = 0
            while hits < len(blocks) and blocks[hits] in self.cache:
                hits += 1
            for block in reversed(blocks):
                self.cache[block] = None
                self.cache.move_to_end(block)
            while len(self.cache) > self.capacity:
                self.cache.popitem(last=False)
            tokens = len(prompt) * TOKENS_PER_CHAR
            cached = min(hits * BLOCK_CHARS * TOKENS_PER_CHAR, tokens - 1)
            self.counts.requests += 1
            self.counts.prompt_tokens += tokens
            self.counts.cached_tokens += cached
            await asyncio.sleep((tokens - cached) / self.rate)


class HttpWorker:
    """Enough of HTTP/1.1 for a router's proxy: keep-alive, bodies with a length, JSON or one event a token."""

    def __init__(self, prefill: Prefill | None) -> None:
        self.prefill = prefill
        self.port = 0

    async def start(self) -> None:
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path = head.split(" ", 2)[:2]
                length = next((int(v) for k, v in _headers(head) if k == "content-length"), 0)
                body = await reader.readexactly(length)
                await self._answer(writer, method, path, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        if method != "POST":
            _write(writer, {"status": "ok", "object": "list", "data": [{"id": "fake", "object": "model"}]})
            return
        asked = json.loads(body) if path in ("/v1/completions", "/tokenize") else {}
        if path == "/tokenize":  # vllm-router's cache_aware compares ids, where a worker makes them for it
            ids = [int(asked["prompt"][i : i + 8], 16) for i in range(0, len(asked["prompt"]) - 7, 8)]
            _write(writer, {"count": len(ids), "max_model_len": 1 << 20, "tokens": ids})
            return
        if not asked:  # it asks for /v1/completions/render too, and goes on without
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        if self.prefill is not None:
            await self.prefill.serve(asked["prompt"])
        answer = {
            "id": "c", "object": "text_completion", "created": 1, "model": "fake",
            "choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            "kv_transfer_params": asked.get("kv_transfer_params"),
        }  # fmt: skip
        if not asked.get("stream"):
            _write(writer, answer)
            return
        events = [json.dumps(answer)] * int(asked.get("max_tokens", 1)) + ["[DONE]"]
        data = "".join(f"data: {event}\n\n" for event in events).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n")


def _headers(head: str) -> Iterator[tuple[str, str]]:
    for line in head.split("\r\n")[1:]:
        name, found, value = line.partition(":")
        if found:
            yield name.strip().lower(), value.strip()


def _write(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def run(options: argparse.Namespace) -> None:
    prefills = [HttpWorker(Prefill(options.rate, options.cache_blocks)) for _ in range(options.prefill)]
    decodes = [HttpWorker(None) for _ in range(options.decode)]
    for worker in (*prefills, *decodes):
        await worker.start()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say({"prefill": [w.port for w in prefills], "decode": [w.port for w in decodes]})
    while line := await reader.readline():
        if json.loads(line)["do"] == "stop":
            return
        _say([asdict(w.prefill.counts) for w in prefills if w.prefill is not None])


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------ from the bench's side


class Talk:
    """A process that answers each JSON line with one; a context manager that ends it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True
            )
        self._log = log

    def __enter__(self) -> Talk:
        self.ready = self._read()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write('{"do": "stop"}\n')
        self._process.stdin.close()
        self._process.wait(20)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a fake did not start:\n{self._log.read_text()[-2000:]}")
        return json.loads(line)

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what}) + "\n")
        self._process.stdin.flush()
        return self._read()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def vllm_router(prefills: Sequence[int], decodes: Sequence[int], policy: str) -> Iterator[int]:
    """vllm-router over those workers, prefill by that policy; yields its port."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"]
    command += ["--prefill-policy", policy, "--decode-policy", "round_robin", "--policy", policy]
    command += [part for p in prefills for part in ("--prefill", f"http://127.0.0.1:{p}")]
    command += [part for p in decodes for part in ("--decode", f"http://127.0.0.1:{p}")]
    command += ["--worker-startup-check-interval", "1"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "router.log"
        with log.open("w") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=os.environ | {"RUST_LOG": "error"}
            )
        try:
            _await_http(port, process, log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_http(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"vllm-router did not start:\n{log.read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--rate", type=float, default=200_000.0)
    parser.add_argument("--cache-blocks", type=int, default=8000)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
