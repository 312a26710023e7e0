"""The law that cores and page books keep together, looked at after any event. Pure; for tests and replay.

    ctx   every pin that an attempt has is in the books, and no other is, but those the loop has just made
    gen   every page of a hand-off that goes on is held; a page that a copy of ours may write is neither free nor cached
    both  a core that has nothing holds nothing

The books' own law (pool.py) says that the numbers add up; this says whose they are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tailrace.kv_cache.pool import PagePool, PageState
from tailrace.transfer.core_state import look
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.hand import real_pages

UNUSED = (PageState.FREE, PageState.CACHED)


def disagreement(core: CtxCore | GenCore, pool: PagePool, pins_on_their_way: Counter[int] | None = None) -> str | None:
    """What is wrong between a core and its worker's books; None if nothing is.

    Args:
        pins_on_their_way: made by the loop, in events that the core has not been given yet.
    """
    if isinstance(core, CtxCore):
        return _of_ctx(look(core), pool, pins_on_their_way or Counter())
    return _of_gen(look(core), pool)


def _of_ctx(state: dict[str, Any], pool: PagePool, on_their_way: Counter[int]) -> str | None:
    owned = Counter(on_their_way)
    for attempt in state["_attempts"].values():
        owned.update(attempt.pinned.values())
    pins = pool.columns()["pins"]
    for page in owned.keys() | {page for page, n in enumerate(pins) if n}:
        if pins[page] != owned[page]:
            return f"page {page} has {pins[page]} pins, the attempts of the ctx core have {owned[page]}"
    return None


def _of_gen(state: dict[str, Any], pool: PagePool) -> str | None:
    for key, hand in state["_hands"].items():
        for page in real_pages(hand.pages):
            if pool.state(page) in UNUSED:
                return f"page {page} of the hand-off {key} is {pool.state(page).name.lower()}"
    for number, job in state["_jobs"].items():
        for page in job.pages:
            if pool.state(page) in UNUSED:
                return f"page {page} is {pool.state(page).name.lower()} while copy {number} for {job.key} may write it"
            if job.quarantined and pool.state(page) is not PageState.QUARANTINED:
                return f"page {page} is not quarantined while copy {number} for {job.key} may write it"
    quarantined = {page for job in state["_jobs"].values() if job.quarantined for page in job.pages}
    for page, n in enumerate(pool.columns()["quarantines"]):
        if n and page not in quarantined:
            return f"page {page} is quarantined, but no copy may write it"
    return None
