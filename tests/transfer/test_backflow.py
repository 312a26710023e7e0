"""Back-flow: the decisions of ctx over real page books, with reads that end as the test says."""

from __future__ import annotations

import random

import pytest
from handoff_sim import NAMESPACE, PAGE, layout

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import PageLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.transfer import core_events as ce
from tailrace.transfer.backflow import MAX_OFFERS, OFFER_LIFE_S, PATIENCE_S, Backflow
from tailrace.transfer.messages import Offer, PageDescriptor
from tailrace.transfer.transports.base import ReadDone

HASHER = BlockHasher(b"s", PAGE)
IDS = list(range(100, 124))  # six pages
RESULT = ce.Metric.BACKFLOW_OFFERS


class Ctx:
    def __init__(self, pages: int = 24, tokens_per_page: int = PAGE) -> None:
        group = layout().group
        self.kv = KvManager(PageLayout(group, tokens_per_page, "float32"), pages + 1, PAGE)
        self.core = Backflow(self.kv)
        self.results: list[str] = []
        self.tokens = 0.0
        self.jobs = []
        self.now = 0.0

    def did(self, actions):
        for action in actions:
            if isinstance(action, ce.StartRead):
                self.jobs.append(action.job)
            elif action.metric == RESULT:
                self.results.append(action.labels["result"])
            elif action.metric == ce.Metric.BACKFLOW_TOKENS:
                self.tokens += action.value

    def offer(self, ids, unit_tokens=PAGE, name="r", boot="g"):
        count = -(-len(ids) // unit_tokens)
        pages = tuple(PageDescriptor(0, i, 40 + i, 7) for i in range(count))
        hashes = HASHER.hash_blocks("s", ids)
        frame = Offer(name, 0, NAMESPACE, hashes, len(ids) // PAGE * PAGE, pages)
        self.did(self.core.offered(boot, unit_tokens, frame, self.now))

    def advance(self, seconds=0.0, busy=False):
        self.now += seconds
        self.did(self.core.advance(self.now, busy))

    def end(self, stale=(), error=None):
        job = self.jobs[-1]
        pages = [page for page, _ in job.units]
        ok = tuple(page for page in pages if page.ordinal not in stale) if error is None else ()
        bad = tuple(page for page in pages if page.ordinal in stale)
        self.did(self.core.done(ReadDone(job.job, job.key, ok, bad, error)))

    def prefill(self, ids):
        """A prompt that ctx has computed itself."""
        pages = self.kv.allocate(self.kv.layout.num_pages(len(ids)))
        self.kv.publish(NAMESPACE, HASHER.hash_blocks("s", ids), pages, len(ids))
        self.kv.release(pages)

    def known(self, ids):
        hit = self.kv.match_prefix(NAMESPACE, HASHER.hash_blocks("s", ids), len(ids), whole=True)
        self.kv.release(hit.pages)
        return hit.num_tokens

    def quiet(self):
        assert self.core.idle and self.kv.counts().used == 0
        self.kv.check()


def test_only_what_ctx_lacks_is_read_and_the_whole_is_found_then():
    ctx = Ctx()
    ctx.prefill(IDS[:8])
    ctx.offer(IDS)
    ctx.advance()
    (job,) = ctx.jobs
    assert [page.ordinal for page, _ in job.units] == [2, 3, 4, 5] and job.job < 0 and job.boot == "g"
    assert (job.into.first_token, job.into.num_tokens) == (8, 24)
    assert ctx.known(IDS) == 8 and ctx.kv.counts().held == 6, "held while it is read"
    ctx.end()
    assert ctx.known(IDS) == 24 and ctx.results == ["read"] and ctx.tokens == 16
    ctx.quiet()


def test_what_changed_at_gen_is_dropped_with_all_that_follows_it():
    ctx = Ctx()
    ctx.offer(IDS)
    ctx.advance()
    ctx.end(stale=(3,))
    assert ctx.known(IDS) == 12 and ctx.results == ["stale"] and ctx.tokens == 12
    ctx.offer(IDS)
    ctx.advance()
    ctx.end(error="its mapping was closed")
    assert ctx.known(IDS) == 12
    ctx.quiet()


def test_what_is_known_is_not_read_again():
    ctx = Ctx()
    ctx.prefill(IDS)
    ctx.offer(IDS)
    ctx.advance()
    assert not ctx.jobs and ctx.results == ["known"]
    ctx.quiet()


def test_it_takes_no_held_page_and_leaves_a_quarter_of_the_pool_to_prompts():
    ctx = Ctx(pages=16)
    held = ctx.kv.allocate(6)
    ctx.offer(IDS)
    ctx.advance()  # 10 available, 6 needed, 4 are to stay
    assert len(ctx.jobs) == 1
    ctx.end()
    more = ctx.kv.allocate(1)
    ctx.offer([7, *IDS])
    ctx.advance()
    assert ctx.results == ["read", "no_room"] and ctx.known(IDS) == 24
    ctx.kv.release(held + more)
    ctx.quiet()


def test_one_at_a_time_behind_hand_offs_but_not_for_ever():
    ctx = Ctx()
    ctx.offer(IDS[:8])
    ctx.offer([5, *IDS][:8], name="s")
    ctx.advance(0.1, busy=True)
    assert not ctx.jobs
    ctx.advance(PATIENCE_S, busy=True)
    ctx.advance(0.1)
    assert len(ctx.jobs) == 1, "the second waits for the first"
    ctx.end()
    ctx.advance()
    assert len(ctx.jobs) == 2
    ctx.end()
    ctx.quiet()


def test_offers_that_waited_too_long_or_of_the_dead_are_dropped_and_their_number_is_bounded():
    ctx = Ctx()
    for n in range(MAX_OFFERS + 3):
        ctx.offer([n, *IDS], name=f"r{n}")
    assert ctx.results == ["crowded"] * 3
    ctx.core.gone("g")
    ctx.advance()
    assert not ctx.jobs
    ctx.offer(IDS)
    ctx.advance(OFFER_LIFE_S + 1)
    assert ctx.results[-1] == "late" and not ctx.jobs
    ctx.quiet()


def test_an_offer_whose_pages_do_not_follow_each_other_is_no_offer():
    ctx = Ctx()
    frame = Offer("r", 0, NAMESPACE, b"", 8, (PageDescriptor(0, 1, 4, 7),))
    (measure,) = ctx.core.offered("g", PAGE, frame, 0.0)
    assert measure.metric == ce.Metric.STALE_FRAMES


@pytest.mark.parametrize("unit_tokens", [2, 4, 8, 16])
@pytest.mark.parametrize("tokens_per_page", [2, 4, 8])
def test_pages_of_other_sizes_are_read_by_token(unit_tokens, tokens_per_page):
    ctx = Ctx(48, tokens_per_page)
    ctx.prefill(IDS[:8])
    ctx.offer(IDS, unit_tokens)
    ctx.advance()
    (job,) = ctx.jobs
    assert [page.ordinal for page, _ in job.units] == list(range(8 // unit_tokens, -(-24 // unit_tokens)))
    assert job.into.first_token == 8
    firsts = [job.into.pages.index(page) * tokens_per_page for _, page in job.units]
    assert all(first <= max(8, page.ordinal * unit_tokens) for first, (page, _) in zip(firsts, job.units, strict=True))
    ctx.end()
    assert ctx.known(IDS) == 24
    ctx.quiet()


def test_whatever_comes_in_whatever_order_leaves_the_books_right():
    for seed in range(60):
        rng, ctx = random.Random(seed), Ctx(pages=20)
        for step in range(40):
            choice = rng.random()
            ids = [rng.randrange(3), *IDS[: rng.randrange(4, 23)]]
            if choice < 0.4:
                ctx.offer(ids, rng.choice([2, 4, 8]), name=f"r{step}")
            elif choice < 0.5:
                ctx.prefill(ids[: len(ids) // PAGE * PAGE] or ids)
            elif choice < 0.55:
                ctx.core.gone("g")
            elif choice < 0.8 and not ctx.core.idle:
                ctx.end(stale=(rng.randrange(6),) if rng.random() < 0.3 else ())
            else:
                ctx.advance(rng.random(), busy=rng.random() < 0.5)
            ctx.kv.check()
        if not ctx.core.idle:
            ctx.end()
        ctx.quiet()
