"""What a ctx core keeps of one attempt's prefill, its reader, and how it ended. Plain data; ctx_core.py decides."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tailrace.kv_cache.layout import Layout
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import ID_BYTES, Handoff, LandingGrant, PageDescriptor, Submit, handed_tokens
from tailrace.transfer.request_state import State


@dataclass(slots=True)
class Reader:
    """The gen that is bound to an attempt. `told`: pages of ordinals below it were announced to this reader."""

    boot: str
    transport: str
    wanted: tuple[tuple[int, int, int], ...]
    pin_until: float
    told: int = 0
    handoff_sent: float | None = None
    grants: deque[LandingGrant] = field(default_factory=deque)
    granted: set[tuple[int, int]] = field(default_factory=set)  # (chunk, sequence) of all grants: each is used once
    posted: int = 0  # ordinals below it were posted, or are not wanted
    landing: bool = False
    again: list[int] = field(default_factory=list)  # ordinals to be posted once more: their bytes were wrong
    sums_from: int = 0  # first token whose sums the reader wants
    owed: set[int] = field(default_factory=set)  # ordinals whose sums it was not sent yet


@dataclass(slots=True)
class Attempt:
    """One attempt's prefill leg. `num_tokens`: those that are computed here. `pages`: final, by ordinal; `pinned`:
    every page whose pin is ours, by ordinal."""

    submit: Submit
    num_tokens: int
    state: State
    deadline: float | None
    started: bool = False
    in_loop: bool = True  # the loop has not said its last word
    cancelled: bool = False  # pages already given back; waits for the loop's last word
    pinned: dict[int, int] = field(default_factory=dict)
    pages: dict[int, PageDescriptor] = field(default_factory=dict)
    final: int = 0  # ordinals below it are final
    tokens_ready: int = 0
    seconds_left: float | None = None
    last_launched: bool = False
    reader: Reader | None = None
    dismissed: dict[str, Any] = field(default_factory=dict)  # boot of a former reader -> its last word, if any
    handoff: Handoff | None = None

    @classmethod
    def of(cls, submit: Submit, now: float) -> Attempt:
        num_tokens = handed_tokens(_num_known(submit), submit.left_to_gen)
        return cls(submit, num_tokens, State.PLACED, None if submit.timeout_s is None else now + submit.timeout_s)

    @property
    def key(self) -> Key:
        return (self.submit.request, self.submit.attempt)

    @property
    def needs(self) -> int:
        """Tokens that a gen will need pages for, those left to it included."""
        return _num_known(self.submit)

    @property
    def all_ready(self) -> bool:
        return self.tokens_ready >= self.num_tokens

    def final_pages(self, layout: Layout) -> int:
        """Ordinals below it are in their last form: an open page and the state, only when all is computed."""
        return layout.moved_pages(self.num_tokens) if self.all_ready else layout.full_pages(self.tokens_ready)


def _num_known(submit: Submit) -> int:
    return (len(submit.prompt_ids) + len(submit.output_ids)) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. `pages`: (page, generation) by ordinal, of one whose pins ended before its release."""

    why: str  # released | finished | cancelled | failed | expired
    reader: str | None = None
    pages: dict[int, PageDescriptor] = field(default_factory=dict)
