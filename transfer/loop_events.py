"""What a worker's loop and its transfer thread say to each other. Frozen data only, torch-free.

The loop polls `LoopEvent`s and answers through the methods of `LoopPort`, which `transfer/node.py` implements (tests
use a fake). Neither side ever waits for the other: every method of LoopPort returns at once and may be called from the
loop's thread only. It knows no sockets, no pools and no model. If the transfer thread dies the rank process dies too.

Who says the last word about a key (request, attempt), after which the loop forgets it:
    ctx, leg `prefill`   `prefill_done`, or `ended` after Cancelled, or `failed`
    gen, leg `local`     `ended` or `failed`
    gen, after Admitted  `ended` or `failed`
`ended` for a key whose Cancelled is still on its way is right, and so is Cancelled for a key that the loop has just
ended: each side ignores what it no longer knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.kv_cache.manager import EXACT, Fidelity
from tailrace.transfer.messages import Delta, Handoff, Moved, PageDescriptor, PrefillSample, Submit, TokenLogprob

Key = tuple[str, int]
"""(request, attempt)."""

MAX_UNTOLD_PREFILLS = 128  # of a worker whose heartbeats do not go out


# ------------------------------------------------------------------------------------------------------ node -> loop


@dataclass(frozen=True, slots=True)
class Arrived:
    """A leg to run: `submit.leg` is `prefill` (ctx) or `local` (prefill and decode here).

    `received`: time.monotonic() when the frame came, the origin of the stamps `queue` and `prefill`.
    """

    submit: Submit
    received: float

    @property
    def key(self) -> Key:
        return (self.submit.request, self.submit.attempt)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A hand-off that is complete and valid: gen may decode. The hold on `pages` passes to the loop, which releases it.

    `pages`: one a page ordinal of the first `handoff.num_tokens` tokens, and of those that are left to gen
    (SCRATCH_PAGE where the group no longer needs that page). `num_matched_tokens`: of them, tokens whose pages this
    worker already had (published, so read-only). `wire_s`: from bind to valid on this worker's clock. `fidelity`: who
    may find these pages in the prefix index. `ctx`: boot id of the worker that they came from. `exposed_s`: of wire_s,
    what came after all pages were final. `moved`: how they came, for the client's receipt.
    """

    handoff: Handoff
    pages: tuple[int, ...]
    num_matched_tokens: int
    wire_s: float
    fidelity: Fidelity = EXACT
    ctx: str = ""
    exposed_s: float = 0.0
    moved: Moved | None = None

    @property
    def key(self) -> Key:
        return (self.handoff.request, self.handoff.attempt)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Stop work on a key and release its pages; answer with `ended(key, "cancelled")`. Nothing more is sent for it.

    `reason`: `client` and other words of the ingress, `lease` (ingress gone), `timeout` (its own deadline), `drain`.
    """

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing new; what runs may go on for `limit_s`."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class FaultsSet:
    """Tests only: the faults that are the loop's (transfer/faults.py). All others stay inside the node."""

    poison: bool
    preempt: int = 0
    slow_pass_s: float = 0.0


LoopEvent = Arrived | Admitted | Cancelled | DrainAsked | FaultsSet


# ------------------------------------------------------------------------------------------------------ loop -> node


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first new token of one sample. `token` is None only when max_tokens is 0 (echo); `finish` is then `length`.

    `finish`: None | stop | length. `stop_id`: the id that ended it (it stands in the delta's ids too, not in the text).
    """

    token: int | None
    logprob: TokenLogprob | None = None
    finish: str | None = None
    stop_id: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What the last chunk of a leg `prefill` gave.

    `firsts`: one a sample, in order; none if tokens are left to gen. `num_tokens`: tokens whose state is in the pages
    (prompt and earlier output). `prompt_logprobs`: as Delta has them. `cached_tokens`: of the prompt, found in the
    prefix index. `stamps`: seconds on this worker's clock, at least `queue` and `prefill`.
    """

    firsts: tuple[FirstToken, ...]
    num_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    stamps: dict[str, float] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if every sample ended with its first token, so that no gen is needed."""
        return bool(self.firsts) and all(first.finish is not None for first in self.firsts)


@dataclass(frozen=True, slots=True)
class Turn:
    """A sample that has ended, for back-flow: its published pages by ordinal from 0, exact, with their generations.

    `ctx`: boot id of the worker that its prompt came from. `hashes` cover `num_tokens`.
    """

    key: Key
    ctx: str
    namespace: bytes
    hashes: bytes
    num_tokens: int
    pages: tuple[PageDescriptor, ...]


@dataclass(slots=True)
class LoopStats:
    """Overwritten by the loop once a pass, read by the transfer thread at any time (single fields, no lock).

    `stamp`: time.monotonic() of the last pass (also of idle passes). `phase`: load | compile | run. `headroom_pages`:
    what the oldest running request may still need; gen grants no bind that would leave fewer. Rates are 0 until known.

    The rest only grows. `prompt_positions`: positions that prefill computed here (on gen: local, replay and recompute,
    of which `replayed_positions` and `recomputed_positions`). `prefix_hit_tokens`: prompt tokens found in the index.
    `preemptions`: sequences put back. `drafts_*`: guesses of tokens that were verified, and those of them that became
    tokens; `undrafted`: requests decoded without guesses, by reason. `shadow_*`: shadow checks by result, and the time
    they took. `prefills`: the last ones, until told.
    """

    stamp: float = 0.0
    phase: str = "load"
    running: int = 0
    queued: int = 0
    queue_age_s: float = 0.0
    headroom_pages: int = 0
    prefill_tokens_queued: int = 0
    prefill_tokens_per_s: float = 0.0
    prompt_positions: int = 0
    recomputed_positions: int = 0
    replayed_positions: int = 0
    prefix_hit_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    undrafted: dict[str, int] = field(default_factory=dict)
    shadow_equal: int = 0
    shadow_different: int = 0
    shadow_skipped: int = 0
    shadow_seconds: float = 0.0
    prefills: deque[PrefillSample] = field(default_factory=lambda: deque(maxlen=MAX_UNTOLD_PREFILLS))


class LoopPort(Protocol):
    """What the loop may call of its node. Thread: the loop's, except that `wait` is woken by the node's."""

    loop_stats: LoopStats

    def poll_events(self) -> list[LoopEvent]:
        """Every event since the last call, in order; empty if none."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Sleep until an event is there (True) or the time is over (False)."""
        ...

    def chunk_launched(self, key: Key, last: bool, seconds_left: float) -> None:
        """The forward of a chunk has been launched; `seconds_left`: predicted seconds of prefill still to come."""
        ...

    def chunk_done(self, key: Key, pages: Sequence[int], tokens_ready: int, seconds_left: float) -> None:
        """The forward of a chunk has *completed*. Call it while the loop still holds the pages.

        `pages`: the sequence's whole page list in ordinal order from 0, prefix hits included, at least as long as
        `tokens_ready` (absolute: tokens whose state is final) needs. The node pins them before it returns.
        """
        ...

    def prefill_done(self, key: Key, result: PrefillResult) -> None:
        """The last word on a leg `prefill`, after the last `chunk_done`. Publish full blocks, then release the hold."""
        ...

    def tokens(self, deltas: Sequence[Delta]) -> None:
        """New tokens of this pass; each goes to the ingress link of its request."""
        ...

    def turn_ended(self, turn: Turn) -> None:
        """Offer a finished sample's pages to its ctx. They need not be held."""
        ...

    def ended(self, key: Key, outcome: str) -> None:
        """The loop has let go of the key and its pages. outcome: finished | cancelled."""
        ...

    def failed(self, key: Key, code: str, message: str, retryable: bool) -> None:
        """As `ended`, and the ingress is told by Fail (codes in messages.Fail)."""
        ...
