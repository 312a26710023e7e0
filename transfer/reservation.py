"""What gen sets aside when it is bound: the prefix it holds, and pages for everything else, all or nothing.

One function over the page books; the core decides beforehand whether a bind is possible at all. Pure.
"""

from __future__ import annotations

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.bitmap import Unit, UnitBitmap
from tailrace.transfer.core_events import PairUp
from tailrace.transfer.hand import Hand
from tailrace.transfer.messages import Bind, NotNow, handed_tokens
from tailrace.transfer.page_plan import Destination, overlapping

RETRY_S = 0.1  # when a refused bind may fit, as far as this worker can know


def reserve(kv: KvManager, bind: Bind, pair: PairUp, headroom_pages: int, now: float) -> Hand | NotNow:
    """A hand-off whose pages are held, or why they do not fit now; then nothing is held.

    Args:
        headroom_pages: what must stay available unless this bind could not be served without it.
    """
    layout, num_tokens = kv.layout, handed_tokens(bind.num_tokens, bind.left_to_gen)
    num_pages, first = layout.num_pages(bind.num_tokens), layout.first_needed_page(num_tokens)
    hit = kv.match_prefix(bind.namespace, bind.hashes, num_tokens, whole=True, steps=pair.steps)
    kv.release(hit.pages[:first])  # before the window
    held = hit.pages[first:]
    missing = num_pages - max(first, len(hit.pages))
    available = kv.available()
    roomy = missing > available or available - missing >= headroom_pages
    new = kv.allocate(missing) if roomy else None
    if new is None:
        kv.release(held)
        why = "pages" if roomy else "headroom"
        return NotNow(bind.request, bind.attempt, why, missing, available, RETRY_S)
    pages = [SCRATCH_PAGE] * first + held + new
    matched = min(len(hit.pages) * layout.tokens_per_page, num_tokens)
    first_token = max(layout.first_needed_token(num_tokens), matched)
    into = Destination(tuple(pages), first_token, num_tokens)
    unit_tokens = pair.tokens_per_page or layout.tokens_per_page
    # State pages cross whatever of the history is here: the prefix index knows nothing of what is overwritten.
    state = range(layout.history_pages(num_tokens), layout.moved_pages(num_tokens))
    expected = [Unit(0, o) for o in (*overlapping(unit_tokens, first_token, num_tokens), *state)]
    return Hand(
        bind, pair, pages, into, unit_tokens, matched, UnitBitmap(expected), now, now, now, held=hit.fidelity,
        num_state_units=len(state), num_state_pages=layout.num_state_pages,
        num_ahead=num_pages - layout.num_pages(num_tokens), is_opaque=layout.is_opaque,
    )  # fmt: skip
