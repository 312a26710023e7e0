"""Both protocol cores over real pools whose pages hold different numbers of tokens, in one process, without sockets."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE, PageLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer import core_events as ce
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.loop_events import Admitted, FirstToken, PrefillResult
from tailrace.transfer.messages import Bind, Bound, Cancel, PeerAddress, Release, Submit, Want, pack_ids
from tailrace.transfer.page_plan import PoolGeometry
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.in_process import Exchange, InProcessTransport
from tailrace.transfer.transports.reading import Mapped

BLOCK = 8
TOKEN_BYTES = 2 * 2 * 4  # k and v of one head and two dims in fp32
NAMESPACE = b"n" * 16
POISON = 0xEE
CONFIG = ce.CoreConfig(pin_lease_s=1e6, request_lease_s=1e6, kv_transfer_timeout_s=1e6)
PAGES = 70


class Side:
    """One worker's pool, books and transport."""

    def __init__(self, exchange: Exchange, boot: str, tokens: int, window: int | None):
        kind = GroupKind.HISTORY if window is None else GroupKind.WINDOW
        self.layout = PageLayout(
            StateGroup(kind, (0,), (Field("k", 1, 2), Field("v", 1, 2)), window), tokens, "float32"
        )
        self.geometry = PoolGeometry(tokens, 1, 2, 1, 2, "float32")
        generations = np.zeros(PAGES, np.uint64)
        self.kv = KvManager(self.layout, PAGES, BLOCK, generations)
        self.pages = np.full((PAGES, self.layout.bytes_per_page), POISON, np.uint8)
        self.kv.set_poison(lambda freed: self.pages.__setitem__(list(freed), POISON))
        self.transport = InProcessTransport(exchange, boot, Mapped((self.pages,), generations))

    def row(self, page: int, token: int) -> np.ndarray:
        """[field, dim] of a token in a page."""
        return (
            self.pages[page]
            .view(np.float32)
            .reshape(2, self.layout.tokens_per_page, 2)[:, token % self.layout.tokens_per_page]
        )


class Pair:
    """A ctx and a gen; `run` carries frames over until nothing moves."""

    def __init__(self, ctx_tokens: int, gen_tokens: int, window: int | None = None):
        exchange = Exchange()
        self.ctx, self.gen = Side(exchange, "c", ctx_tokens, window), Side(exchange, "g", gen_tokens, window)
        self.gen.transport.connect("c", b"c", Conversion(self.ctx.geometry, self.gen.geometry))
        self.ctx_core = CtxCore(self.ctx.kv, CONFIG)
        self.gen_core = GenCore(self.gen.kv, self, CONFIG, lambda: 0)
        self.queue: deque[tuple[Any, Any]] = deque()
        self.sent: list[Any] = []
        self.jobs: list[Any] = []
        self.measured: dict[str, float] = {"logical": 0, "wire": 0}
        self.admitted: list[Admitted] = []
        self.hold = False
        self.feed(self.gen_core, ce.PairUp("c", "in_process", False, True, 0, ctx_tokens))

    # the gen core's Wire
    def grants(self, key, boot, n):
        return ()

    def reclaim(self, key, boot):
        pass

    def still_valid(self, boot, seen):
        return self.gen.transport.still_valid(boot, seen)

    def feed(self, core: Any, event: Any) -> None:
        for action in core.handle(event, 0.0):
            match action:
                case ce.ToPeer():
                    self.sent.append(action.frame)
                    to_gen = core is self.ctx_core
                    self.queue.append(
                        (self.gen_core if to_gen else self.ctx_core, ce.FromPeer("c" if to_gen else "g", action.frame))
                    )
                case ce.ToRouter():
                    self.sent.append(action.frame)
                case ce.StartRead():
                    self.jobs.append(action.job)
                    self.gen.transport.read(action.job)
                case ce.AbandonRead():
                    self.gen.transport.abandon(action.boot, action.job)
                case ce.ToLoop() if isinstance(action.event, Admitted):
                    self.admitted.append(action.event)
                case ce.Measure() if action.metric is ce.Metric.TRANSFER_BYTES:
                    self.measured[action.labels["kind"]] += action.value

    def run(self) -> None:
        while True:
            while self.queue:
                self.feed(*self.queue.popleft())
            if self.hold:
                return
            done = self.gen.transport.poll()
            for event in done:
                self.feed(self.gen_core, event)
            if not (done or self.queue):
                return

    # ------------------------------------------------------------------------------------------------------ one request

    def prompt(self, name: str, tokens: list[int], chunk: int, *, bind_after: int = 0) -> None:
        """A request from Submit to the end of its prefill; gen is bound after so many tokens."""
        hashes = BlockHasher(b"secret", BLOCK).hash_blocks("scope", tokens)
        frame = Submit(
            name, 0, "prefill", pack_ids(tokens), b"", SamplingParams(max_tokens=4), 1, hashes, NAMESPACE, 0, 1e6, None,
            False,
        )  # fmt: skip
        bind = Bind(1, name, 0, PeerAddress("c", "c", "h", 1), len(tokens), 8, 1, hashes, NAMESPACE)
        self.feed(self.ctx_core, ce.FromIngress(frame))
        key, kv, bound, pinned = (name, 0), self.ctx.kv, False, 0
        pages = kv.allocate(kv.layout.num_pages(len(tokens)))
        assert pages is not None
        for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
            if not bound and bind_after < end:
                bound = True
                self.feed(self.gen_core, ce.FromRouter(bind))
            self.run()
            start = (end - 1) // chunk * chunk
            self.feed(self.ctx_core, ce.ChunkLaunched(key, end == len(tokens), 0.1))
            for position in range(start, end):
                self.ctx.row(pages[position // kv.layout.tokens_per_page], position)[:] = state(tokens, position)
            reach = kv.layout.num_pages(end)
            kv.pin(pages[pinned:reach])
            done = ce.ChunkDone(key, tuple(enumerate(pages))[pinned:reach], end, 0.1)
            pinned = reach
            self.feed(self.ctx_core, done)
        if not bound:
            self.feed(self.gen_core, ce.FromRouter(bind))
        self.feed(self.ctx_core, ce.PrefillDone(key, PrefillResult((FirstToken(7),), len(tokens))))
        kv.release(pages)
        self.run()

    def decoded(self, tokens: list[int]) -> None:
        """The last admitted request holds the state of every token that decode may read; then it ends and is cached."""
        event, kv = self.admitted[-1], self.gen.kv
        first = kv.layout.group.first_needed_token(len(tokens))
        for position in range(first, len(tokens)):
            row = self.gen.row(event.pages[position // kv.layout.tokens_per_page], position)
            np.testing.assert_array_equal(row, state(tokens, position), f"token {position}")
        assert event.pages.count(SCRATCH_PAGE) == first // kv.layout.tokens_per_page
        if SCRATCH_PAGE not in event.pages:
            kv.publish(NAMESPACE, event.handoff.hashes, event.pages, len(tokens))
        kv.release([page for page in event.pages if page != SCRATCH_PAGE])
        self.feed(self.gen_core, ce.LoopEnded(event.key, "finished"))

    def quiet(self) -> None:
        for side, core in ((self.ctx, self.ctx_core), (self.gen, self.gen_core)):
            side.kv.check()
            assert core.idle and side.kv.counts().used == 0, side.kv.counts()

    def last(self, kind: type) -> Any:
        return next(frame for frame in reversed(self.sent) if isinstance(frame, kind))


def state(tokens: list[int], position: int) -> np.ndarray:
    """[field, dim] that a model would compute: it depends on every token up to the position."""
    return np.float32(hash(tuple(tokens[: position + 1])) % 9973) + np.arange(4, dtype=np.float32).reshape(2, 2) / 8


def ids(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


SIZES = st.sampled_from([1, 2, 4, 8, 16, 24, 32])


@settings(deadline=None, max_examples=60)
@given(
    ctx=SIZES, gen=SIZES, length=st.integers(1, 60), chunk=st.integers(1, 60), bind_after=st.integers(0, 60),
    warm=st.integers(0, 60), window=st.sampled_from([None, None, 1, 5, 24]),
)  # fmt: skip
def test_gen_decodes_what_ctx_computed_whatever_the_page_sizes(ctx, gen, length, chunk, bind_after, warm, window):
    pair = Pair(ctx, gen, window)
    tokens = ids(length, 1)
    if warm:
        pair.prompt("warm", tokens[:warm], 60)
        pair.decoded(tokens[:warm])
    hashes = BlockHasher(b"secret", BLOCK).hash_blocks("scope", tokens)
    hit = pair.gen.kv.match_prefix(NAMESPACE, hashes, length, whole=True)
    pair.gen.kv.release(hit.pages)
    held_pages = {page: pair.gen.pages[page].copy() for page in hit.pages}
    pair.measured = {"logical": 0, "wire": 0}
    pair.prompt("r", tokens, chunk, bind_after=bind_after)
    layout = pair.gen.kv.layout
    lacking = range(max(layout.group.first_needed_token(length), min(hit.num_tokens, length)), length)
    units = {token // ctx for token in lacking}
    assert pair.measured == dict.fromkeys(("logical", "wire"), len(lacking) * TOKEN_BYTES)
    assert {ordinal for _, ordinal, _ in pair.last(Release).seen} == units
    read = [descriptor.ordinal for job in pair.jobs if job.key == ("r", 0) for descriptor, _ in job.units]
    assert sorted(read) == sorted(units), "each page is read once, in its final state"
    assert all((pair.gen.pages[page] == before).all() for page, before in held_pages.items()), (
        "held pages are read only"
    )
    pair.decoded(tokens)
    pair.quiet()


def test_a_prompt_that_gen_holds_whole_moves_nothing_and_frees_ctx():
    pair = Pair(16, 4)
    tokens = ids(32, 2)
    for name in ("first", "second"):
        pair.measured = {"logical": 0, "wire": 0}
        pair.prompt(name, tokens, 20)
        pair.decoded(tokens)
        pair.quiet()
    assert pair.measured == {"logical": 0, "wire": 0}
    assert pair.last(Want).ordinals == () and pair.last(Release).seen == ()


def test_a_page_of_ctx_that_gen_holds_in_part_is_read_in_part():
    """Gen holds 24 tokens in pages of 8: of ctx's second page of 16 it reads the second half."""
    pair = Pair(16, 8)
    tokens = ids(40, 3)
    pair.prompt("warm", tokens[:24], 40)
    pair.decoded(tokens[:24])
    pair.measured = {"logical": 0, "wire": 0}
    pair.prompt("r", tokens, 40)
    assert pair.last(Want).ordinals == ((0, 1, 3),)
    assert pair.measured == dict.fromkeys(("logical", "wire"), 16 * TOKEN_BYTES)
    pair.decoded(tokens)
    pair.quiet()


def test_gen_reserves_by_its_own_page_size():
    pair = Pair(64, 4)
    pair.prompt("r", ids(33, 4), 64)
    assert pair.last(Bound).pages == 9 and len(pair.admitted[0].pages) == 9
    pair.decoded(ids(33, 4))
    pair.quiet()


def test_a_page_that_two_reads_write_is_quarantined_until_both_have_ended():
    """Pages of 4 tokens come in two reads, both into gen's one page of 16; the request is cancelled meanwhile."""
    pair = Pair(4, 16)
    pair.gen.transport.hook, pair.gen.transport.pages_per_poll = (lambda key, page: True), 1
    pair.hold = True
    pair.prompt("r", ids(16, 5), 8)
    while pair.queue:
        pair.feed(*pair.queue.popleft())
    assert [len(job.units) for job in pair.jobs] == [2, 2] and pair.gen.kv.counts().held == 1
    events = pair.gen.transport.poll()  # a page of each read has been copied: they must run to their ends
    assert not events
    pair.feed(pair.gen_core, ce.FromRouter(cancel("r")))
    assert pair.gen.kv.counts().quarantined == 1
    ended = []
    while pair.gen_core.jobs():
        for event in pair.gen.transport.poll():
            pair.feed(pair.gen_core, event)
            ended.append(pair.gen.kv.counts().quarantined)
    assert ended == [1, 0]
    pair.hold = False
    pair.feed(pair.ctx_core, ce.FromIngress(cancel("r")))
    pair.run()
    pair.quiet()


def cancel(name: str) -> Cancel:
    return Cancel(name, 0, "client")


@pytest.mark.parametrize(("ctx", "gen"), [(16, 16), (8, 64), (64, 8)])
def test_what_lies_before_the_window_is_neither_pinned_at_ctx_nor_moved(ctx, gen):
    pair = Pair(ctx, gen, window=24)
    tokens = ids(66, 6)  # rows from token 43 on can still be read
    pair.hold = True
    pair.prompt("r", tokens, 20)
    assert pair.ctx.kv.counts().pinned == -(-66 // ctx) - 43 // ctx
    pair.hold = False
    pair.run()
    assert {o for _, o, _ in pair.last(Release).seen} == set(range(43 // ctx, -(-66 // ctx)))
    assert pair.measured["wire"] == (66 - 43) * TOKEN_BYTES
    pair.decoded(tokens)
    pair.quiet()
