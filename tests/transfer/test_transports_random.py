"""The conformance suite: thousands of random transfers, each byte verified, and writers that come late.

A page that nobody holds is filled with poison, and a page that somebody holds says who wrote it. So a write that comes
after its page has changed hands is seen: at the latest when the page is taken the next time.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import numpy as np
import pytest
from transport_abilities import needs
from transport_peers import (
    KINDS,
    LANDING,
    READING,
    ChildCtx,
    Gen,
    LocalCtx,
    Move,
    assert_moved,
    assert_quiet,
    stamp,
    units_for,
)

PAGE_BYTES = 256
NUM_PAGES = 257
POISON = 0xEE
# One transfer costs about 0.3 ms by reading, 2 ms over nixl and ucx, 4 ms over ray: `make test` has what takes a few
# seconds, `make soak` all ten thousand of each.
IN_TEST = dict.fromkeys(READING, 10_000) | {"nixl": 1000, "ucx": 1000, "ray": 200}
ABORT_WITHIN_S = 0.005


@dataclass
class Hold:
    """One transfer under way: what should stand where."""

    move: Move
    owners: dict[int, int]  # ctx's page -> who had written it when it was announced
    dst: dict[int, int]  # ctx's page -> ours
    abort_at: float  # when it is given up if it has not ended by then, monotonic seconds
    aborted: bool = False


class Crowd:
    """Transfers from two workers, some given up, while the workers use their pages anew.

    Args:
        churn: how often, of a hundred, a worker writes pages anew before a transfer is started.
        aborts: how many of a hundred transfers are given up.
    """

    def __init__(self, gen: Gen, seed: int, *, churn: int = 30, aborts: int = 20) -> None:
        self.rng, self.gen, self.churn, self.aborts = random.Random(seed), gen, churn, aborts
        self.ctxs = [gen.new_ctx(f"c{i}", NUM_PAGES, child=False) for i in range(2)]
        assert gen.kind == "peer_cuda" or all(isinstance(ctx, LocalCtx) for ctx in self.ctxs)
        self.writers: list[dict[int, tuple[int, int]]] = []  # of each ctx: page -> (owner, generation)
        self.next_owner = 0
        for ctx in self.ctxs:
            self.writers.append({})
            self._write(ctx, len(self.writers) - 1, range(1, NUM_PAGES))
        self.free = list(range(1, NUM_PAGES))
        self.holds: list[Hold] = []
        self.num_whole = self.num_stale = 0
        gen.arena.pages[:] = POISON

    def _write(self, ctx: LocalCtx | ChildCtx, which: int, pages: range | list[int]) -> None:
        self.next_owner += 1
        for page, generation in zip(pages, ctx.write(pages, self.next_owner), strict=True):
            self.writers[which][page] = (self.next_owner, generation)

    def run(self, n: int) -> None:
        started = 0
        end = time.monotonic() + 600
        while started < n or self.holds:
            assert time.monotonic() < end, f"{len(self.holds)} transfers do not end"
            while started < n and len(self.holds) < 16 and len(self.free) >= 8:
                self._start(started)
                started += 1
            self.gen.step()
            for hold in self.holds:
                if not hold.aborted and hold.move.jobs and time.monotonic() >= hold.abort_at:
                    hold.aborted = True
                    for job in hold.move.jobs:
                        self.gen.transport.abandon(hold.move.boot, job)
            for hold in [hold for hold in self.holds if hold.move.over]:
                self._end(hold)
        assert (self.gen.arena.pages[self.free] == POISON).all(), "a page was written after it was given back"

    def _start(self, number: int) -> None:
        which = self.rng.randrange(2)
        ctx, writer = self.ctxs[which], self.writers[which]
        src = self.rng.sample(range(1, NUM_PAGES), self.rng.randint(1, 8))
        dst = [self.free.pop(self.rng.randrange(len(self.free))) for _ in src]
        assert (self.gen.arena.pages[dst] == POISON).all(), "a page was written while nobody held it"
        key = (f"r{number}", 1 + number % 3)
        move = self.gen.start(key, ctx, units_for(src, [writer[page][1] for page in src], dst))
        owners = {page: writer[page][0] for page in src}
        # Drawn once, not at each poll: how often a machine polls must not decide how many transfers are given up.
        given_up = self.rng.random() < self.aborts / 100
        abort_at = time.monotonic() + self.rng.random() * ABORT_WITHIN_S if given_up else math.inf
        self.holds.append(Hold(move, owners, dict(zip(src, dst, strict=True)), abort_at))
        if self.rng.random() < self.churn / 100:
            self._write(ctx, which, self.rng.sample(range(1, NUM_PAGES), 4))

    def _end(self, hold: Hold) -> None:
        self.holds.remove(hold)
        del self.gen.moves[hold.move.key]
        for descriptor in hold.move.ok:
            wanted = stamp(hold.owners[descriptor.page], descriptor.page, PAGE_BYTES)
            assert (self.gen.arena.pages[hold.dst[descriptor.page]] == wanted).all(), "a page that counts is wrong"
        self.num_whole += len(hold.move.ok) == len(hold.dst)
        self.num_stale += bool(hold.move.stale)
        dst = list(hold.dst.values())
        self.gen.arena.pages[dst] = POISON
        self.free += dst


def run_crowd(kind: str, n: int, make_gen) -> None:
    gen = make_gen(kind, PAGE_BYTES, NUM_PAGES)
    crowd = Crowd(gen, seed=n)
    crowd.run(n)
    assert crowd.num_whole > n // 5, f"{crowd.num_whole} of {n} came whole"
    assert len(crowd.free) == NUM_PAGES - 1
    assert crowd.num_stale, "pages were used anew under the transfers"
    assert_quiet(gen)


@pytest.mark.parametrize("kind", KINDS)
def test_random_transfers_are_right_to_the_byte_and_no_page_is_written_after_it_changed_hands(kind, make_gen):
    run_crowd(kind, IN_TEST[kind], make_gen)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [kind for kind in LANDING if IN_TEST[kind] < 10_000])
def test_ten_thousand_random_transfers_over_the_slow_transports(kind, make_gen):
    run_crowd(kind, 10_000, make_gen)


# --------------------------------------------------------------------------------------------------------- late writers


@pytest.mark.parametrize("moment", ["before it packed", "while it sent"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stopped_ctx_sends_after_gen_has_given_up_touches_no_page_of_the_next_owner(kind, moment, make_gen):
    """A1, B17: the stopped worker has grants and addresses of a request whose pages belong to another by then."""
    needs(kind, "another process")
    needs(kind, "landing chunks")
    gen = make_gen(kind, 65536, 130)
    late, other = gen.new_ctx("late", 130, child=True), gen.new_ctx("other", 130, child=True)
    assert isinstance(late, ChildCtx)
    src = list(range(1, 65))
    units = units_for(src, late.write(src, owner=1), src)
    if moment == "before it packed":
        late.set_hold(0)
    gone = gen.start(("gone", 1), late, units)
    gen.grant_and_post(gone, limit=4)
    late.stop()
    late.tell("set_hold", None)  # the first thing that it will do
    del gen.ctxs["late"]
    for event in gen.transport.poll():
        if hasattr(event, "landed"):
            gen.transport.drop_landed(event.boot, event.landed)
    gen.transport.disconnect("late")  # the request is gone, its pages and chunks belong to others
    gen.moves.clear()
    counts = gen.transport.counts()
    assert counts.free == counts.total
    theirs = units_for(src, other.write(src, owner=2), src)
    gen.finish(gen.start(("next", 1), other, theirs))
    landed = len(gen.landed)
    late.go_on()
    late.hear()
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        late.step()
        gen.step()
        time.sleep(0.001)
    assert_moved(gen, theirs, owner=2)
    assert [event.boot for event in gen.landed[landed:]] == [], "what it sent late was taken for something"
    assert (gen.arena.pages[65:] == 0xEE).all()
    late.close()
    assert_quiet(gen)


@pytest.mark.parametrize("kind", LANDING)
def test_a_killed_ctx_takes_nothing_with_it_and_another_goes_on(kind, make_gen):
    gen = make_gen(kind, 65536, 200)
    dies, lives = gen.new_ctx("dies", 200, child=True), gen.new_ctx("lives", 200, child=True)
    assert isinstance(dies, ChildCtx)
    src = list(range(1, 33))
    half = units_for(src, dies.write(src, owner=1), src)
    whole = units_for(src, lives.write(src, owner=2), [page + 100 for page in src])
    dies.set_hold(0)
    gone = gen.start(("gone", 1), dies, half)
    gen.step()
    kept = gen.start(("kept", 1), lives, whole)
    dies.kill()
    del gen.ctxs["dies"], gen.moves["gone", 1]
    gen.transport.disconnect("dies")
    gen.finish(kept)
    assert len(kept.ok) == 32 and not gone.ok
    assert_moved(gen, whole, owner=2)
    assert np.array_equal(gen.arena.pages[1:33], np.full((32, 65536), 0xEE, np.uint8))
    dies.close()
    assert_quiet(gen)
