"""Every state of small worlds: two requests of three pages, a drop, duplicate, delay, stop, kill or cancel anywhere.

Each state that can be reached is looked at for the law of the ledger, and from each the quiet end must be reachable.
Planted faults show that the search would find one; the number of states shows that it looks at what it is said to.
"""

from dataclasses import replace

import pytest
from handoff_search import search
from handoff_sim import PAGE
from small_scope import FAULTS, Scope

from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore

READING = Scope(attempts=1)
LANDING = Scope(attempts=1, landing=True, chunk_tokens=12, units_per_grant=3)
ONCE_MORE = Scope(requests=1)  # a second attempt, at the successor of what was killed
SCOPES = {
    "reading": (READING, 60_000),
    "reading, two faults": (replace(READING, faults=2, kinds=("drop", "duplicate", "late", "cancel")), 120_000),
    "landing": (LANDING, 30_000),
    "landing, two writes": (replace(LANDING, requests=1, chunk_tokens=6, units_per_grant=2, kinds=FAULTS[:3]), 3_000),
    "a second attempt": (ONCE_MORE, 15_000),
    "pages of twice the tokens": (replace(READING, requests=1, gen_page=8), 5_000),
    "pages of half the tokens": (replace(READING, requests=1, gen_page=2, gen_pages=8), 5_000),
    "prompts that begin alike": (replace(READING, shared=True, kinds=("drop", "kill", "cancel")), 10_000),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name == "reading, two faults")) for name in SCOPES]
)
def test_no_state_breaks_the_law_and_every_state_leads_to_the_quiet_end(name, record_property):
    scope, at_least = SCOPES[name]
    found = search(scope)
    record_property("found", str(found))
    assert found.broken is None, "\n".join([found.broken, *found.history])
    assert found.whole and found.states >= at_least and found.ends > 10
    words = {"late": "late", **{kind: kind for kind in scope.kinds}}
    assert all(found.faults[words[kind]] for kind in scope.kinds), found.faults


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scope",
    [
        replace(READING, attempts=2, linger=True),
        replace(READING, requests=1, faults=2, attempts=2),
        replace(LANDING, attempts=2),
        replace(LANDING, requests=1, chunk_tokens=6, units_per_grant=2, attempts=2),
        replace(LANDING, requests=1, faults=2),
    ],
    ids=["reading", "1 request, 2 faults", "landing", "landing, chunks", "landing, 2 faults"],
)
def test_larger_worlds_hold_the_law_too(scope, record_property):
    found = search(scope)
    record_property("found", str(found))
    assert found.broken is None, "\n".join([found.broken, *found.history])
    assert found.whole


# ------------------------------------------------------------------------------------------------------ planted faults


class ReleasesUnderACopy(GenCore):
    """Frees the pages of a dropped hand-off at once, also those that a copy may still write."""

    def _drop(self, hand, why, *, tell_ctx):
        for number in hand.jobs:
            self._jobs.pop(number)
        hand.jobs.clear()
        return super()._drop(hand, why, tell_ctx=tell_ctx)


class AnnouncesTheOpenPage(CtxCore):
    """Tells of the page that the next chunk will still write."""

    def _chunk_done(self, event, now):
        attempt = self._attempts.get(event.key)
        open_too = -(-event.tokens_ready // PAGE) * PAGE
        if attempt is not None and event.tokens_ready < attempt.num_tokens:
            event = replace(event, tokens_ready=min(attempt.num_tokens - 1, open_too))
        return super()._chunk_done(event, now)


class ReusesChunksAtOnce(GenCore):
    """Takes the landing chunks of a dropped hand-off back before its peer has said that it posts no more."""

    def _drop(self, hand, why, *, tell_ctx):
        self._wire.reclaim(hand.key, hand.pair.boot)
        hand.grants = {}
        return super()._drop(hand, why, tell_ctx=tell_ctx)


class ForgetsTheRelease(CtxCore):
    """Answers a release and keeps the pins."""

    def _release(self, boot, release):
        attempt = self._attempts.get((release.request, release.attempt))
        if attempt is not None:
            attempt.pinned = {}
        return super()._release(boot, release)


class ForgetsTheQuarantine(GenCore):
    """Does not give the pages of a dropped hand-off back when the copy has ended."""

    def _read_done(self, done, now):
        job = self._jobs.get(done.job)
        if job is not None and job.quarantined:
            del self._jobs[done.job]
            return []
        return super()._read_done(done, now)


class NeverRepeats(GenCore):
    """Says Want and Release once: what is lost is lost."""

    def _repeat(self, hand, now):
        hand.asked_at = now
        return []

    def _tick(self, event, now):
        for hand in self._hands.values():
            hand.progress_at = now
        return super()._tick(event, now)


EARLY, LOST = "early free", "lost release"


@pytest.mark.parametrize(
    ("what", "scope", "planted", "word"),
    [
        (EARLY, replace(READING, kinds=("cancel",)), {"gen_core": ReleasesUnderACopy}, "writes into page"),
        (EARLY, replace(READING, kinds=("kill",)), {"gen_core": ReleasesUnderACopy}, "closed under a copy"),
        ("early word", READING, {"ctx_core": AnnouncesTheOpenPage}, "whose content is another's"),
        (EARLY, LANDING, {"gen_core": ReusesChunksAtOnce}, "which is another's"),
        (LOST, READING, {"ctx_core": ForgetsTheRelease}, "something is still held"),
        (LOST, READING, {"gen_core": ForgetsTheQuarantine}, "something is still held"),
        (LOST, LANDING, {"ctx_core": ForgetsTheRelease}, "something is still held"),
        ("no retry", replace(READING, requests=1), {"gen_core": NeverRepeats}, "no quiet end"),
    ],
    ids=lambda value: "-".join(cls.__name__ for cls in value.values()) if isinstance(value, dict) else None,
)
def test_the_search_finds_a_planted_fault_and_tells_the_shortest_way_to_it(what, scope, planted, word):
    found = search(replace(scope, **planted))
    assert found.broken is not None and word in found.broken, (found.broken, str(found))
    assert 0 < len(found.history) <= 40
