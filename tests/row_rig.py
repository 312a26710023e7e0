"""A ctx and a gen of a family with rows of its own in one process: real loops, engines, nodes and transports.

    with RowRig(ref, "shm") as rig:
        rig.assert_equal(prompts)           # disaggregated answers are those of `ref`
        rig.quiet()

Tests play the router and the ingress (node_rig.Hub). Freed pages are poisoned at both workers.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from node_rig import SECRET, Hub, until
from oracle import Comparison, Reference, greedy

from tailrace.cluster.worker import compat_record
from tailrace.ctx_worker.loop import CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.engine import Engine, pool_tensor
from tailrace.engine.step import Logprob
from tailrace.gen_worker.drafting import Drafting
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.kernels.paged_attention import RowSpan
from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.manager import KvManager
from tailrace.model.replay_policy import ReplayPolicy
from tailrace.model.row_store import RowPool
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.core_events import CoreConfig
from tailrace.transfer.messages import (
    Bind,
    Bound,
    Delta,
    Epoch,
    Fail,
    Holding,
    NotNow,
    PeerAddress,
    Peers,
    Progress,
    Register,
    Renew,
    Submit,
    Tokens,
    pack_ids,
    unpack_ids,
)
from tailrace.transfer.node import Node
from tailrace.transfer.switchboard import NodeConfig
from tailrace.transfer.transports.in_process import Exchange, InProcessTransport
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.reading import Mapped
from tailrace.transfer.transports.shm import ShmTransport

SPACE = b"n" * 16
LIMIT_S = 60.0


@dataclass
class Side:
    """One worker."""

    node: Node
    kv: KvManager
    engine: Engine
    loop: Any
    thread: threading.Thread
    arena: Arena


@dataclass
class Answer:
    """What came for one request. `moved`: of its transfer."""

    samples: list[list[int]]
    finished: set[int] = field(default_factory=set)
    stamps: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    moved: Any = None
    failed: str = ""


class RowRig:
    """See the module.

    Args:
        ref: whose model, layout and blocks are served.
        chunk: tokens of a pass at most.
        replay: of every prompt's end at gen; None: ctx computes whole prompts.
        whole_ctx: with replay, ctx has the upper layers for all that, for prompts that leave nothing to gen.
        tail: prompt ids that gen gets.
        drafts: guesses a row, of a decoder that can make them.
    """

    def __init__(
        self, ref: Reference, kind: str = "shm", *, chunk: int = 64, ctx_pages: int = 400, gen_pages: int = 400,
        verify: bool = False, core: type | None = None, replay: ReplayPolicy | None = None, tail: int | None = None,
        drafts: int = 0, whole_ctx: bool = False,
    ) -> None:  # fmt: skip
        self.ref, self.kind, self.chunk, self.verify = ref, kind, chunk, verify
        self.replay, self.tail, self.drafts = replay, tail, drafts
        self.lower_ctx = replay is not None and not whole_ctx
        self.block = ref.kv.block_tokens
        self.hasher = BlockHasher(SECRET, self.block)
        self.exchange, self.stop = Exchange(), threading.Event()
        self.router, self.ingress = Hub("router", "router-1"), Hub("ingress", "ingress-1")
        self.port = self.router.listen()
        self.sides: dict[str, Side] = {}
        self.numbers = iter(range(1, 10**6))
        for name, pages in (("c0", ctx_pages), ("g0", gen_pages)):
            self._start(name, pages)
        for name, side in self.sides.items():
            side.node.set_router("127.0.0.1", self.port)
            self.router.expect(Register, 20)
            self.router.send(name, Epoch(1, "router-1"))
            self.router.expect(Holding, 20)
            self.ingress.dial(self.sides[name].node)
        self.router.send("g0", Peers((self.ctx_address,)))
        until(lambda: self.gen.node.ready_pairs, 20)

    @property
    def ctx(self) -> Side:
        return self.sides["c0"]

    @property
    def gen(self) -> Side:
        return self.sides["g0"]

    @property
    def ctx_address(self) -> PeerAddress:
        node: Any = self.ctx.node
        return PeerAddress("c0", node.config.boot, *node.address)

    def _start(self, name: str, num_pages: int) -> None:
        ref, layout, boot = self.ref, self.ref.layout, secrets.token_hex(4)
        role = {"c": "ctx", "g": "gen"}[name[0]]
        arena = Arena.create(arena_name("rowtest", name, boot), layout, num_pages + 1)
        kv = KvManager(layout, num_pages + 1, self.block, arena.generations)
        engine = Engine(self._decoder(role), pool_tensor(arena.pages, layout))
        engine.warm_up(self.chunk, 2)
        engine.poison(range(1, num_pages + 1))
        kv.set_poison(engine.poison)
        config: Any = SimpleNamespace(block_tokens=self.block)
        compat = compat_record(config, ref.source, layout, [pool_tensor(arena.pages, layout)])
        core = CoreConfig(
            pin_lease_s=20.0, request_lease_s=60.0, kv_transfer_timeout_s=20.0, verify_pages=self.verify,
            prompt_tail_tokens=self.tail,
        )  # fmt: skip
        node = Node(
            NodeConfig(
                worker=name, boot=boot, home=role, duty=role, host="127.0.0.1", secret=SECRET, compat=compat,
                max_num_tokens=self.chunk, max_request_tokens=4096, core=core, heartbeat_s=0.5, report_s=1.0,
            ),
            kv, lambda wake, hook: [self._transport(boot, arena, wake, hook)], pages=[arena.pages],
        )  # fmt: skip
        node.address = node.start()  # type: ignore[attr-defined]
        ahead = engine.read_ahead if engine.reads_ahead else None
        eos, prefill = ref.source.eos_ids, PrefillScheduler(self.chunk, read_ahead=ahead)
        if role == "ctx":
            loop: Any = CtxLoop(
                engine, kv, node, prefill, eos_ids=eos, grammars=ref.grammars, lower_half=self.lower_ctx
            )
        else:
            decode = DecodeScheduler(
                layout, max_batch_size=16, max_num_tokens=self.chunk, max_gen_init_admissions_per_pass=4,
                max_drafts=self.drafts,
            )  # fmt: skip
            upper = self.replay.decoder if self.replay else 0
            loop = GenLoop(
                engine, kv, node, decode, prefill, eos_ids=eos, grammars=ref.grammars, replay_tokens=upper,
                drafting=Drafting(self.drafts) if self.drafts else None,
            )  # fmt: skip
        thread = threading.Thread(target=loop.run, args=(self.stop,), daemon=True, name=f"loop-{name}")
        self.sides[name] = Side(node, kv, engine, loop, thread, arena)
        thread.start()

    def _decoder(self, role: str) -> Any:
        weights: Any = self.ref.weights
        if role == "gen" or not self.lower_ctx:
            return weights
        family: Any = self.ref.source.family
        tokens = self.ref.layout.tokens_per_page
        return family.load_lower(self.ref.source.tensors, weights.config, weights.dtype, tokens)

    def _transport(self, boot: str, arena: Arena, wake: Any, hook: Any) -> Any:
        if self.kind == "shm":
            return ShmTransport(arena, wake=wake, hook=hook)
        if self.kind == "nixl":
            page = self.ref.layout.bytes_per_page
            chunks = ChunkConfig(landing_chunks=4, staging_chunks=2, chunk_bytes=3 * page)
            return NixlTransport(boot, arena, chunks, wake=wake, hook=hook)
        return InProcessTransport(self.exchange, boot, Mapped((arena.pages,), arena.generations), hook=hook)

    # --------------------------------------------------------------------------------------------------------- requests

    def ask(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, *, samples: int = 1,
        leg: str = "prefill", no_cache: bool = False, output: Sequence[int] = (),
    ) -> list[Answer]:  # fmt: skip
        """All at once; the answers in the order of the prompts. `output`: what a former attempt has sent."""
        params = params or greedy(10)
        answers: dict[tuple[str, int], Answer] = {}
        binds: dict[tuple[str, int], Bind] = {}
        for prompt in prompts:
            key = (secrets.token_hex(16), 0)
            answers[key] = Answer([list(output) for _ in range(samples)])
            hashes = self.hasher.hash_blocks("scope", [*prompt, *output])
            left = self.replay.encoder if self.replay and leg == "prefill" else 0
            frame = Submit(
                *key, leg, pack_ids(prompt), pack_ids(output), params, samples, hashes, SPACE, 0, 60.0, None, no_cache,
                left_to_gen=left,
            )  # fmt: skip
            self.ingress.send("c0" if leg == "prefill" else "g0", frame)
            if leg == "prefill":
                about = (len(prompt) + len(output), params.max_tokens, samples, hashes, SPACE, left)
                binds[key] = Bind(0, *key, self.ctx_address, *about)
        end = time.monotonic() + LIMIT_S
        while any(not a.failed and len(a.finished) < samples for a in answers.values()):
            assert time.monotonic() < end, f"no answer: {answers}"
            self._from_router(binds)
            self._from_ingress(answers)
        return list(answers.values())

    def _from_router(self, binds: dict[tuple[str, int], Bind]) -> None:
        while not self.router.frames.empty():
            _, frame = self.router.frames.get()
            if isinstance(frame, Bound):
                self.ingress.send("g0", Renew(((frame.request, frame.attempt),), 60.0))
            elif isinstance(frame, NotNow):
                if frame.why in ("pages", "headroom", "pair"):
                    time.sleep(0.02)
                    self._bind(binds, (frame.request, frame.attempt))
            elif isinstance(frame, Progress) and not frame.read:
                key = (frame.request, frame.attempt)
                if key in binds and not binds[key].seq:
                    self._bind(binds, key)

    def _bind(self, binds: dict[tuple[str, int], Bind], key: tuple[str, int]) -> None:
        binds[key] = replace(binds[key], seq=next(self.numbers))
        self.router.send("g0", binds[key])

    def _from_ingress(self, answers: dict[tuple[str, int], Answer]) -> None:
        try:
            _, frame = self.ingress.frames.get(timeout=0.005)
        except queue.Empty:
            return
        if isinstance(frame, Fail):
            answers[frame.request, frame.attempt].failed = f"{frame.code}: {frame.message}"
        if isinstance(frame, Tokens):
            for delta in frame.deltas:
                self._take(answers[delta.request, delta.attempt], delta)

    @staticmethod
    def _take(answer: Answer, delta: Delta) -> None:
        sample = answer.samples[delta.sample]
        assert delta.start == len(sample), "a token is missing or repeated"
        sample += unpack_ids(delta.ids)
        answer.cached_tokens = max(answer.cached_tokens, delta.cached_tokens)
        answer.moved = delta.moved or answer.moved
        answer.stamps = answer.stamps or delta.stamps
        if delta.finish is not None:
            answer.finished.add(delta.sample)

    def assert_equal(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 10, *, share: float = 0.9,
        among: Comparison | None = None, **options: Any,
    ) -> list[Answer]:  # fmt: skip
        """Ask, and hold every token against REF. `among`: of many calls, whose share of compared positions the caller
        looks at: in a few answers one near tie early on weighs too much."""
        answers = self.ask(prompts, greedy(max_tokens), **options)
        comparison = Comparison() if among is None else among
        for answer, expected in zip(answers, self.ref.generate(prompts, greedy(max_tokens)), strict=True):
            assert not answer.failed, answer.failed
            for sample in answer.samples:
                comparison.add(expected.samples[0].logprobs, sample)
        if among is None:
            comparison.check(share)
        return answers

    # -------------------------------------------------------------------------------------------------------------- end

    def quiet(self) -> None:
        """Nothing is used at either worker, and the books add up."""
        until(lambda: all(side.node.idle and not side.kv.counts().used for side in self.sides.values()), 10)
        for side in self.sides.values():
            side.kv.check()

    def close(self) -> None:
        self.stop.set()
        for side in self.sides.values():
            side.thread.join(10)
            side.node.stop()
        self.router.close()
        self.ingress.close()
        for side in self.sides.values():
            side.arena.close()
            side.arena.unlink()

    def __enter__(self) -> RowRig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@torch.inference_mode()
def one_process(ref: Reference, prompt: Sequence[int], policy: ReplayPolicy, count: int) -> list[Logprob]:
    """The greedy answer behind a prompt of which the upper layers know only the end: one row a step, no loops."""
    decoder: Any = ref.weights
    size = len(prompt) + count
    pool = RowPool(torch.full((80, ref.layout.bytes_per_page), 0xFF, dtype=torch.uint8), decoder.layout)
    table = np.arange(1, 1 + ref.layout.num_pages(size), dtype=np.int32)
    begin = max(0, len(prompt) - policy.decoder)
    ids, found = list(prompt), []
    cuts = [0, *([begin] if begin else []), *range(len(prompt), size)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        span = RowSpan(start, end - start, table, upper_from=begin)
        hidden = decoder.forward(torch.tensor(ids[start:end]), torch.arange(start, end), pool, [span])
        if end >= len(prompt):
            logprobs = decoder.logits(hidden[-1:])[0].log_softmax(-1)
            top = logprobs.topk(5)
            pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            found.append(Logprob(pairs[0][0], pairs[0][1], pairs))
            ids.append(pairs[0][0])
    return found
