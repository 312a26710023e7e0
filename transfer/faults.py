"""Faults for tests, as plain data and the counters that spend them. None of it exists unless the config allows faults.

The node consults one `Faults` object about frames and gives its transports a hook that is asked before each page; no
other code knows that faults exist. A plan is the worker's whole fault configuration: setting another one replaces it,
and setting `{}` releases what is held and ends all faults. Dies with its worker.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tailrace.transfer.core_events import StartPost, ToPeer
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import CacheEvent, PageDescriptor, Ready, Sums, Want
from tailrace.transfer.transports.base import CopyFailed, PageHook

FRAME_KINDS = ("ready", "handoff", "release", "landed")
ALL = -1  # a count that never ends
FLIP_PLACES = ("pool", "staging", "unpacked")
EVENT_FAULTS = ("drop", "dup", "swap")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The fault configuration of one worker.

    Attributes:
        hold_before_page: pause every transfer before its page of this ordinal, until a plan without it is set. Its
            reader's renewals pause too, so that leases run.
        drop: kind -> how many of the next frames vanish, ALL for every one. Kinds: ready and handoff at ctx, release at
            gen, landed (a landing write's notification) at gen.
        dup: kind -> how many of the next frames are sent twice.
        late_s: kind -> delay of every frame of that kind.
        jitter_s: kind -> every frame of that kind comes a time later that is drawn at random, up to this.
        fail_read: a read of the page of this ordinal fails, `fail_times` times. On gen.
        fail_post: the posting of a landing write that holds the page of this ordinal fails, `fail_times` times. On ctx.
        slow_bytes_per_s: rate limit of the wire.
        poison: freed pages are filled.
        record: write a flight recording, once, when the plan is set.
        preempt: the next n prefills lose their pages in the step that samples their first token. On ctx.
        slow_pass_s: each pass of the loop takes that much longer. On ctx.
        cache_events: what happens to cache events (drop, dup, swap with the next) -> how likely, 0 to 1.
        flip: place -> ordinal of a page in which byte `flip_byte` is xored with `flip_mask`, `flip_times` times.
            pool: of ctx, once the page is final, and summed if pages are verified; staging: of ctx, once it is packed
            and sealed; unpacked: of gen, once the copy into its pages has ended.
    """

    hold_before_page: int | None = None
    drop: dict[str, int] = field(default_factory=dict)
    dup: dict[str, int] = field(default_factory=dict)
    late_s: dict[str, float] = field(default_factory=dict)
    jitter_s: dict[str, float] = field(default_factory=dict)
    fail_read: int | None = None
    fail_post: int | None = None
    fail_times: int = 1
    slow_bytes_per_s: float | None = None
    poison: bool = False
    record: bool = False
    preempt: int = 0
    slow_pass_s: float = 0.0
    cache_events: dict[str, float] = field(default_factory=dict)
    flip: dict[str, int] = field(default_factory=dict)
    flip_byte: int = 0
    flip_mask: int = 255
    flip_times: int = 1

    @staticmethod
    def parse(text: str) -> FaultPlan:
        """From JSON; ValueError names the key at fault. An empty object is a plan without faults."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"faults are not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"faults must be an object, not {type(data).__name__}")
        known = {f.name for f in fields(FaultPlan)}
        for key, value in data.items():
            if key not in known:
                raise ValueError(f"unknown fault {key!r}; known are {', '.join(sorted(known))}")
            _check(key, value)
        return FaultPlan(**data)


def _check(key: str, value: Any) -> None:
    if key in ("drop", "dup", "late_s", "jitter_s"):
        number = float if key in ("late_s", "jitter_s") else int
        if not isinstance(value, dict) or not set(value) <= set(FRAME_KINDS):
            raise ValueError(f"{key} maps kinds ({', '.join(FRAME_KINDS)}) to numbers, not {value!r}")
        if not all(_is_number(v, number) and (v >= 0 or v == ALL) for v in value.values()):
            raise ValueError(f"{key}: a number is wrong in {value!r}")
    elif key == "cache_events":
        if not isinstance(value, dict) or not set(value) <= set(EVENT_FAULTS):
            raise ValueError(f"cache_events maps {', '.join(EVENT_FAULTS)} to likelihoods, not {value!r}")
        if not all(_is_number(v, float) and 0 <= v <= 1 for v in value.values()):
            raise ValueError(f"cache_events: a likelihood is wrong in {value!r}")
    elif key == "flip":
        if not isinstance(value, dict) or not set(value) <= set(FLIP_PLACES):
            raise ValueError(f"flip maps places ({', '.join(FLIP_PLACES)}) to pages, not {value!r}")
        if not all(_is_number(v, int) and v >= 0 for v in value.values()):
            raise ValueError(f"flip: a page is wrong in {value!r}")
    elif key == "flip_mask":
        if not _is_number(value, int) or not 0 < value < 256:
            raise ValueError(f"flip_mask changes bits of one byte: 1 to 255, not {value!r}")
    elif key == "flip_byte":
        if not _is_number(value, int) or value < 0:
            raise ValueError(f"flip_byte is a place in a page, not {value!r}")
    elif key in ("poison", "record"):
        if not isinstance(value, bool):
            raise ValueError(f"{key} is true or false, not {value!r}")
    elif key == "slow_bytes_per_s":
        if value is not None and (not _is_number(value, float) or value <= 0):
            raise ValueError(f"slow_bytes_per_s is a positive number, not {value!r}")
    elif key == "slow_pass_s":
        if not _is_number(value, float) or value < 0:
            raise ValueError(f"slow_pass_s is a time in seconds, not {value!r}")
    elif key == "preempt":
        if not _is_number(value, int) or value < 0:
            raise ValueError(f"preempt is a count, not {value!r}")
    elif key in ("fail_times", "flip_times"):
        if not _is_number(value, int) or value < ALL:
            raise ValueError(f"{key} is a count, not {value!r}")
    elif value is not None and (not _is_number(value, int) or value < 0):
        raise ValueError(f"{key} is the ordinal of a page, not {value!r}")


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind is float and isinstance(value, float) and math.isfinite(value))


class Faults:
    """A plan and what is left of it. Set and asked in the transfer thread; the hooks run in the transports' helpers."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self._lock = threading.Lock()
        self._late_event: CacheEvent | None = None
        self.set(plan or FaultPlan())

    def set(self, plan: FaultPlan) -> None:
        """Replace everything."""
        with self._lock:
            self.plan = plan
            self._drop, self._dup = dict(plan.drop), dict(plan.dup)
            self._failures, self._flips = plan.fail_times, plan.flip_times
            self._asked: dict[Key, set[int]] = {}  # -> sequence numbers of the grants it has sent
            self._lifted: set[Key] = set()
            self._random = random.Random(0)

    def lift(self, key: Key) -> None:
        """Hold this key no more: its request is gone and so is the peer that it was read from."""
        self._lifted.add(key)

    def hushes(self, want: Want) -> bool:
        """Whether this Want only renews, while transfers are held: not the first, and it grants nothing new."""
        if self.plan.hold_before_page is None:
            return False
        key, grants = (want.request, want.attempt), {grant.sequence for grant in want.grants}
        sent = self._asked.get(key)
        self._asked[key] = grants | (sent or set())
        return sent is not None and grants <= sent

    def hook(self, page_bytes: int, *, reads: bool) -> PageHook:
        """What a transport asks before each page. `reads`: this worker reads (fail_read), else it posts (fail_post).

        Its attribute `spoil` is told of each page that has just been copied (base.spoil).
        """

        def before(key: Key, descriptor: PageDescriptor) -> bool:
            plan = self.plan
            if plan.hold_before_page is not None and descriptor.ordinal >= plan.hold_before_page:
                return key in self._lifted
            if descriptor.ordinal == (plan.fail_read if reads else plan.fail_post) and self._fails():
                raise CopyFailed(f"fault: page {descriptor.ordinal} fails")
            if plan.slow_bytes_per_s is not None:
                time.sleep(page_bytes / plan.slow_bytes_per_s)
            return True

        before.spoil = self.spoil  # type: ignore[attr-defined]
        return before

    def spoil(self, place: str, ordinal: int, data: np.ndarray) -> None:
        """Flip a byte of a page [bytes] uint8 that is in this place now, if the plan says so."""
        if self.plan.flip.get(place) == ordinal and self._flips_now():
            data[self.plan.flip_byte % len(data)] ^= self.plan.flip_mask

    def in_pool(self, action: Any, verified: bool) -> list[int]:
        """Pages of ctx's pool in which a byte must be flipped now, before this action of its core is carried out."""
        place = self.plan.flip.get("pool")
        if place is None:
            return []
        if isinstance(action, StartPost):
            pages = () if verified else action.job.pages
        else:
            frame = action.frame if isinstance(action, ToPeer) else None
            pages = frame.pages if isinstance(frame, Sums if verified else Ready) else ()
        return [page.page for page in pages if page.ordinal == place and self._flips_now()]

    def _flips_now(self) -> bool:
        with self._lock:
            flips = self._flips != 0
            self._flips -= self._flips > 0
            return flips

    def _fails(self) -> bool:
        with self._lock:
            fails = self._failures != 0
            self._failures -= self._failures > 0
            return fails

    def frame(self, kind: str) -> tuple[int, float]:
        """(copies to send, delay in seconds) of the next frame of this kind."""
        if self._spend(self._drop, kind):
            return 0, 0.0
        delay = self.plan.late_s.get(kind, 0.0)
        if kind in self.plan.jitter_s:
            delay += self._random.uniform(0.0, self.plan.jitter_s[kind])
        return (2 if self._spend(self._dup, kind) else 1), delay

    def cache_events(self, events: list[CacheEvent]) -> list[CacheEvent]:
        """What of these is sent now; one that is swapped goes behind the next one."""
        wrong, sent = self.plan.cache_events, []
        for event in events:
            late, self._late_event = self._late_event, None
            if self._random.random() >= wrong.get("drop", 0.0):
                if late is None and self._random.random() < wrong.get("swap", 0.0):
                    self._late_event = event
                else:
                    sent += [event] * (2 if self._random.random() < wrong.get("dup", 0.0) else 1)
            if late is not None:
                sent.append(late)
        return sent

    @staticmethod
    def _spend(counts: dict[str, int], kind: str) -> bool:
        left = counts.get(kind, 0)
        if left > 0:
            counts[kind] = left - 1
        return left != 0
