"""A cluster in one event loop for tests of the ingress: a router and two workers that speak real frames.

Tokens come from a script, `outputs(prompt ids, sample) -> ids`; what the real workers decide by sampling is decided
here by the same rules (max_tokens, EOS, stop ids, min_tokens). Gates and switches hold, fail and kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache

import httpx
import uvicorn

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.model.source import ModelSource, open_source
from tailrace.router.flow import FlowPolicy
from tailrace.router.http_app import build_app
from tailrace.router.http_limits import LimitedProtocol
from tailrace.router.ingress import IngressConfig, IngressService
from tailrace.router.router_link import RouterLink
from tailrace.router.worker_links import WorkerLinks
from tailrace.transfer.links import Identity, Link, Listener, listen
from tailrace.transfer.messages import (
    Answer,
    Cancel,
    Delta,
    Done,
    Fail,
    Place,
    Placed,
    Query,
    Refused,
    Renew,
    Stats,
    Submit,
    TokenLogprob,
    Tokens,
    pack_ids,
    unpack_ids,
)  # fmt: skip

SECRET = b"a secret of sixteen bytes or more"
Outputs = Callable[[list[int], int], Sequence[int]]


@cache
def smollm2() -> ModelSource:
    return open_source("smollm2")


class Remembering:
    """SmolLM2's tokenizer; bytes of all its ids are asked for with every service, so they are kept."""

    def __init__(self) -> None:
        tokenizer = smollm2().tokenizer
        self.encode, self.bos_id = tokenizer.encode, tokenizer.bos_id
        self.vocab_size, self.special_ids = tokenizer.vocab_size, tokenizer.special_ids
        self.id_to_bytes = [tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)].__getitem__


@cache
def remembering() -> Remembering:
    return Remembering()


class Server(uvicorn.Server):
    """uvicorn that ends when it is told to, not at its next look at a flag."""

    async def main_loop(self) -> None:
        self.told = asyncio.Event()
        await self.told.wait()


def ids_of(text: str) -> list[int]:
    return smollm2().tokenizer.encode(text, special=False)


def byte_ids(text: str) -> list[int]:
    """One id a byte: characters beyond ASCII then span tokens."""
    table = {smollm2().tokenizer.id_to_bytes(i): i for i in reversed(range(smollm2().tokenizer.vocab_size))}
    return [table[bytes([b])] for b in text.encode()]


def fake_logprob(token: int, top: int) -> TokenLogprob:
    own = -0.25 - (token % 7) / 8
    return TokenLogprob(token, own, tuple(((token + i) % 49152, own - i) for i in range(top)))


@dataclasses.dataclass
class Run:
    """One sample's tokens as a worker would have drawn them, and how it ended."""

    ids: list[int]
    finish: str
    stop_id: int | None


def run_of(script: Sequence[int], submit: Submit, eos: frozenset[int]) -> Run:
    params = submit.params
    ids: list[int] = []
    for token in script:
        if len(ids) >= params.max_tokens:
            break
        ids.append(token)
        stops = token in params.stop_token_ids or (not params.ignore_eos and token in eos)
        if stops and len(ids) > params.min_tokens:
            return Run(ids, "stop", token)
    return Run(ids, "length", None)


class FakeWorker:
    """ctx (`prefill` legs) or gen (`local` legs, and decoding once the ingress renews)."""

    def __init__(self, cluster: FakeCluster, role: str, name: str) -> None:
        self.cluster, self.role, self.name = cluster, role, name
        self.boot = secrets.token_hex(4)
        self.frames: list[object] = []
        self.links: list[Link] = []
        self.gate = asyncio.Event()  # before the first token
        self.gate.set()
        self.decode_gate = asyncio.Event()  # before each later token
        self.decode_gate.set()
        self.token_delay_s = 0.0
        self.stop_after: int | None = None  # tokens of a sample that are sent, then silence
        self.fail_next: Fail | None = None
        self.waiting: dict[tuple[str, int], tuple[Submit, list[Run]]] = {}  # bound, not yet renewed
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.listener: Listener | None = None

    async def start(self) -> None:
        me = Identity(self.role, self.name, self.boot)
        self.listener = await listen(
            "127.0.0.1", 0, me, SECRET, on_link=self.links.append, on_frame=self._frame, on_close=self._closed
        )

    async def kill(self) -> None:
        """As SIGKILL would: the port refuses, links break, nothing more is said."""
        assert self.listener is not None
        self.listener.close()
        for task in self.tasks.values():
            task.cancel()
        self.tasks.clear()
        for link in tuple(self.links):
            link.close("killed")
        await asyncio.sleep(0)

    def count(self, kind: type) -> int:
        return sum(type(frame) is kind for frame in self.frames)

    def of(self, kind: type) -> list:
        return [frame for frame in self.frames if type(frame) is kind]

    def _closed(self, link: Link, reason: str) -> None:
        if link in self.links:
            self.links.remove(link)

    def _frame(self, link: Link, frame: object) -> None:
        self.frames.append(frame)
        if isinstance(frame, Submit):
            self._spawn((frame.request, frame.attempt), self._serve(link, frame))
        elif isinstance(frame, Renew):
            for key in frame.keys:
                if key in self.waiting:
                    submit, runs = self.waiting.pop(key)
                    self._spawn(key, self._decode(link, submit, runs, len(unpack_ids(submit.output_ids)) + 1))
        elif isinstance(frame, Cancel):
            self.waiting.pop((frame.request, frame.attempt), None)
            task = self.tasks.pop((frame.request, frame.attempt), None)
            if task is not None:
                task.cancel()

    def _spawn(self, key: tuple[str, int], work) -> None:
        task = self.tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.tasks.pop(key, None) if self.tasks.get(key) is task else None)

    async def _serve(self, link: Link, submit: Submit) -> None:
        if self.fail_next is not None:
            fail, self.fail_next = self.fail_next, None
            link.send(dataclasses.replace(fail, request=submit.request, attempt=submit.attempt))
            return
        await self.gate.wait()
        prompt = unpack_ids(submit.prompt_ids)
        before = len(unpack_ids(submit.output_ids))
        numbers = range(submit.first_sample, submit.first_sample + submit.samples)
        runs = [run_of(self.cluster.outputs(prompt, i), submit, self.cluster.eos) for i in numbers]
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if submit.params.prompt_logprobs is not None:
            top = submit.params.prompt_logprobs
            prompt_logprobs = tuple(
                TokenLogprob(t, None, ()) if i == 0 else fake_logprob(t, top) for i, t in enumerate(prompt)
            )
        stamps = {"queue": 0.001, "prefill": 0.002}
        link.send(
            Tokens(
                tuple(
                    self._delta(submit, i, run, before, before + 1, prompt_logprobs, stamps)
                    for i, run in enumerate(runs)
                )
            )
        )
        if all(len(run.ids) <= before + 1 for run in runs):
            return
        if submit.leg == "local":
            await self._decode(link, submit, runs, before + 1)
        else:
            self.cluster.prefilled(submit, runs)

    async def _decode(self, link: Link, submit: Submit, runs: list[Run], start: int) -> None:
        for position in range(start, max(len(run.ids) for run in runs)):
            if self.stop_after is not None and position >= self.stop_after:
                await asyncio.sleep(3600)
            await self.decode_gate.wait()
            await asyncio.sleep(self.token_delay_s)
            deltas = [
                self._delta(submit, i, run, position, position + 1)
                for i, run in enumerate(runs)
                if position < len(run.ids)
            ]
            link.send(Tokens(tuple(deltas)))

    def _delta(self, submit, sample, run, start, end, prompt_logprobs=(), stamps=None) -> Delta:
        ids = run.ids[start:end]
        top = submit.params.logprobs
        last = end >= len(run.ids)
        return Delta(
            request=submit.request,
            attempt=submit.attempt,
            sample=submit.first_sample + sample,
            start=start,
            ids=pack_ids(ids),
            logprobs=() if top is None else tuple(fake_logprob(t, top) for t in ids),
            finish=run.finish if last else None,
            stop_id=run.stop_id if last else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=0,
            stamps=stamps or {},
        )


class FakeCluster:
    """The router and its workers. `leg`: prefill (ctx then gen) or local (gen alone)."""

    def __init__(self, outputs: Outputs, *, eos: frozenset[int] | None = None) -> None:
        self.outputs = outputs
        self.eos = smollm2().eos_ids if eos is None else eos
        self.leg = "prefill"
        self.boot = secrets.token_hex(4)
        self.ctx = FakeWorker(self, "ctx", "ctx-0")
        self.gen = FakeWorker(self, "gen", "gen-0")
        self.refuse: Refused | None = None
        self.answers_places = True
        self.bind = True  # a prefilled request gets its gen at once
        self.answers: dict[str, str] = {"ready": '{"status":"ready","reasons":[]}', "cluster": "{}", "metrics": "m 1\n"}
        self.frames: list[object] = []
        self.link: Link | None = None
        self.listener: Listener | None = None

    async def start(self) -> None:
        await self.ctx.start()
        await self.gen.start()
        await self.listen()

    async def listen(self) -> None:
        me = Identity("router", "router", self.boot)
        self.listener = await listen(
            "127.0.0.1", 0, me, SECRET, on_link=self._linked, on_frame=self._frame, on_close=self._closed
        )

    async def find(self) -> tuple[str, int, str] | None:
        return None if self.listener is None else ("127.0.0.1", self.listener.port, self.boot)

    async def kill_router(self) -> None:
        assert self.listener is not None
        self.listener.close()
        self.listener = None
        if self.link is not None:
            self.link.close("killed")
        await asyncio.sleep(0.01)

    async def replace(self, role: str) -> FakeWorker:
        """A new process in the place of a dead one."""
        worker = FakeWorker(self, role, f"{role}-1")
        await worker.start()
        setattr(self, role, worker)
        return worker

    async def close(self) -> None:
        for worker in (self.ctx, self.gen):
            await worker.kill()
        if self.listener is not None:
            await self.kill_router()

    def of(self, kind: type) -> list:
        return [frame for frame in self.frames if type(frame) is kind]

    def placed(self, frame: Place | Submit, leg: str, worker: FakeWorker) -> Placed:
        assert worker.listener is not None
        address = (worker.name, worker.boot, "127.0.0.1", worker.listener.port)
        return Placed(frame.request, frame.attempt, leg, *address)

    def send(self, frame: object) -> None:
        if self.link is not None:
            self.link.send(frame)

    def prefilled(self, submit: Submit, runs: list[Run]) -> None:
        if self.bind:
            self.gen.waiting[(submit.request, submit.attempt)] = (submit, runs)
            self.send(self.placed(submit, "decode", self.gen))

    def _linked(self, link: Link) -> None:
        self.link = link

    def _closed(self, link: Link, reason: str) -> None:
        if self.link is link:
            self.link = None

    def _frame(self, link: Link, frame: object) -> None:
        if isinstance(frame, Stats):
            self.frames = [f for f in self.frames if not isinstance(f, Stats)]
        self.frames.append(frame)
        if isinstance(frame, Query):
            link.send(Answer(frame.number, self.answers[frame.what]))
        elif isinstance(frame, Place):
            if self.refuse is not None:
                link.send(dataclasses.replace(self.refuse, request=frame.request, attempt=frame.attempt))
            elif frame.at or not self.answers_places:
                pass
            elif self.leg == "local":
                link.send(self.placed(frame, "local", self.gen))
            else:
                link.send(self.placed(frame, "prefill", self.ctx))


def config_of(**changes) -> IngressConfig:
    source = smollm2()
    policy = FlowPolicy(router_wait_s=0.5, rebind_wait_s=0.6, request_lease_s=1.5, **changes.pop("policy", {}))
    values = {
        "process": "ingress-0", "model_name": "smollm2", "revision": source.revision, "fidelity": "float32/exact",
        "vocab_size": source.config.vocab_size, "max_request_tokens": 512, "policy": policy, "stats_period_s": 0.2,
    }  # fmt: skip
    return IngressConfig(**(values | changes))


class Api:
    """A running server: its address, its service, its cluster."""

    def __init__(self, url: str, service: IngressService, cluster: FakeCluster) -> None:
        self.url, self.service, self.cluster = url, service, cluster
        self.http = httpx.AsyncClient(base_url=url, timeout=30)

    async def complete(self, **body) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, **body) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": "Hello"}])
        return await self.http.post("/v1/chat/completions", json=body)

    async def events(self, path: str, **body) -> Stream:
        """The whole stream of a request."""
        if path.endswith("chat/completions"):
            body.setdefault("messages", [{"role": "user", "content": "Hello"}])
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            stream = Stream(response.status_code, [])
            if response.status_code != 200:
                stream.error = json.loads(await response.aread())
                return stream
            raw = b"".join([chunk async for chunk in response.aiter_raw()])
        for line in raw.decode().split("\n"):
            if line.startswith("data: "):
                stream.lines.append(line.removeprefix("data: "))
            else:
                assert line == "" or line.startswith(":"), line
        return stream

    async def quiet(self) -> None:
        """Everything is let go of: nothing active, nothing running on a worker."""
        for _ in range(100):
            workers = (self.cluster.ctx, self.cluster.gen)
            if not self.service.active and not any(w.tasks or w.waiting for w in workers):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(
            f"{self.service.active} active, ctx {self.cluster.ctx.tasks}, gen {self.cluster.gen.tasks}"
        )

    def dones(self) -> list[tuple[int, str]]:
        """(attempt, outcome) of every Done the router got."""
        return [(done.attempt, done.outcome) for done in self.cluster.of(Done)]


@dataclasses.dataclass
class Stream:
    """`lines`: payloads of the data lines, `[DONE]` included."""

    status: int
    lines: list[str]
    error: dict | None = None

    @property
    def chunks(self) -> list[dict]:
        return [json.loads(line) for line in self.lines if line != "[DONE]"]

    def text(self, index: int = 0) -> str:
        parts = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                if choice["index"] == index:
                    parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
        return "".join(parts)

    def finish(self, index: int = 0) -> str | None:
        found = [
            choice["finish_reason"]
            for chunk in self.chunks
            for choice in chunk.get("choices", ())
            if choice["index"] == index and choice["finish_reason"]
        ]
        assert len(found) <= 1
        return found[0] if found else None


@contextlib.asynccontextmanager
async def serving(outputs: Outputs, *, eos: frozenset[int] | None = None, **changes) -> AsyncIterator[Api]:
    """The real application under uvicorn, before a fake cluster."""
    cluster = FakeCluster(outputs, eos=eos)
    await cluster.start()
    async with ingress(cluster, **changes) as api:
        yield api
    await cluster.close()


@contextlib.asynccontextmanager
async def ingress(cluster: FakeCluster, *, http=LimitedProtocol, **changes) -> AsyncIterator[Api]:
    config = config_of(**changes)
    source = smollm2()
    me = Identity("ingress", config.process, secrets.token_hex(4))
    service = IngressService(
        config, remembering(), source.chat_template, BlockHasher(SECRET, 16),
        RouterLink(cluster.find, me, SECRET), WorkerLinks(me, SECRET),
    )  # fmt: skip
    server = Server(
        uvicorn.Config(
            build_app(service),
            port=0,
            log_level="critical",
            timeout_graceful_shutdown=2,
            http=http,
            ws="none",
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    api = Api(f"http://127.0.0.1:{port}", service, cluster)
    for _ in range(200):
        if service.has_router or cluster.listener is None:
            break
        await asyncio.sleep(0.005)
    try:
        yield api
    finally:
        await api.http.aclose()
        server.told.set()
        await task
