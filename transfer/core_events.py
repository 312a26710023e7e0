"""What goes into the protocol cores and what comes out. Frozen data only, torch-free.

`transfer/node.py` feeds events and carries actions out; tests and the recorder do the same without sockets. A frame is
wrapped by where it came from, because the same frame means other things from other sides. The clock is an argument of
`handle`, not part of an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from tailrace.transfer.loop_events import Key, LoopEvent, PrefillResult, Turn
from tailrace.transfer.messages import Delta, Fail, Landed, LandingGrant
from tailrace.transfer.transports.base import LandedIn, PostDone, PostJob, ReadDone, ReadJob


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Durations and rules of both cores; equal in every worker of a cluster.

    Attributes:
        pin_lease_s: how long ctx keeps pages pinned for a bound reader that says nothing.
        request_lease_s: for a bound request until the ingress's first Renew reaches gen.
        kv_transfer_timeout_s: a hand-off with no new unit for this long is given up.
        retry_failed_transfers: whether an attempt whose transfer failed may be made again (policy `recompute`).
        prompt_tail_tokens: prompt ids that the hand-off record carries; None for all of them.
        max_grants_per_request: landing chunks that one request may have out: one lands, one is written, one waits.
        remember: ended keys kept, so that late frames are recognized.
        verify_pages: a page counts as arrived only if its sums are those that ctx took.
    """

    pin_lease_s: float = 30.0
    request_lease_s: float = 15.0
    kv_transfer_timeout_s: float = 60.0
    retry_failed_transfers: bool = True
    prompt_tail_tokens: int | None = None
    max_grants_per_request: int = 3
    remember: int = 8192
    verify_pages: bool = False

    @property
    def renew_every_s(self) -> float:
        """How often gen repeats Want or Release while it waits: three times within the shorter of the durations."""
        return min(self.pin_lease_s, self.kv_transfer_timeout_s) / 3


class Wire(Protocol):
    """What a gen core asks of its transports without waiting: books and memory, never a socket."""

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        """At most n free landing chunks for one (peer boot, attempt); none over a transport that reads."""
        ...

    def reclaim(self, key: Key, boot: str) -> None:
        """Ctx has said that it will post no more for this key: its chunks that no notification has named are free."""
        ...

    def still_valid(self, boot: str, seen: tuple[tuple[int, int], ...]) -> bool:
        """Whether a dead peer's mapped memory still shows these (page, generation) unchanged; False if unmapped."""
        ...


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A frame from the ctx or gen worker with this boot id."""

    boot: str
    frame: Any


@dataclass(frozen=True, slots=True)
class FromIngress:
    frame: Any


@dataclass(frozen=True, slots=True)
class FromRouter:
    frame: Any


@dataclass(frozen=True, slots=True)
class RouterUp:
    """A router's epoch was accepted on a new link: what was on the way is lost. Another boot counts its frames anew."""

    router_boot: str


@dataclass(frozen=True, slots=True)
class PairUp:
    """A ctx may be read over `transport`. `landing`: ctx writes into chunks we grant, `units_per_grant` pages each.

    `outlives_peer`: its memory can be read after its death. `tokens_per_page`: of its pages, which are the units of a
    hand-off; 0 if they are as ours. `steps`: lossy ones that its pages may come through, the least lossy first.
    """

    boot: str
    transport: str
    landing: bool
    outlives_peer: bool
    units_per_grant: int = 0
    tokens_per_page: int = 0
    steps: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """What arrives has the bits of what was there, whatever lies between."""
        return not self.steps


@dataclass(frozen=True, slots=True)
class PairDown:
    """The link to a ctx is gone. No evidence of its death, nor of any buffer's state."""

    boot: str


@dataclass(frozen=True, slots=True)
class ChunkLaunched:
    key: Key
    last: bool
    seconds_left: float


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """`pinned`: (ordinal, page) pinned for this key just now by the caller; the core unpins them."""

    key: Key
    pinned: tuple[tuple[int, int], ...]
    tokens_ready: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class PrefillDone:
    key: Key
    result: PrefillResult


@dataclass(frozen=True, slots=True)
class LoopEnded:
    key: Key
    outcome: str


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Goes past the cores: gen keeps nothing of it."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class LoopFailed:
    key: Key
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; at least ten times a second, whether or not there is work."""


class SumPart(NamedTuple):
    """Rows row..row+n-1 of a page of ours, with the weights of rows from `weight_from` on (kernels/page_sums.py)."""

    page: int
    row: int
    n: int
    weight_from: int


@dataclass(frozen=True, slots=True)
class SumJob:
    """Sum units, each the sum of its parts. With `expected`: compare. Else `generations`: which the pages must keep."""

    job: int
    parts: tuple[tuple[SumPart, ...], ...]
    generations: tuple[int, ...] = ()
    expected: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SumsDone:
    """The one answer to a SumJob: whether each is `equal`, or its `sums`, empty where the page was used anew."""

    job: int
    sums: tuple[bytes, ...] = ()
    equal: tuple[bool, ...] = ()


Event = (
    FromPeer | FromIngress | FromRouter | RouterUp | PairUp | PairDown | LandedIn | ReadDone | PostDone
    | ChunkLaunched | ChunkDone | PrefillDone | LoopEnded | LoopFailed | SumsDone | Tick
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Dropped if there is no link to that boot: the receiver recovers by its renewals."""

    boot: str
    frame: Any


@dataclass(frozen=True, slots=True)
class ToRouter:
    frame: Any


@dataclass(frozen=True, slots=True)
class ToIngress:
    """To whoever owns the key's request; kept while there is no link. Deltas of one sample may be merged."""

    key: Key
    item: Delta | Fail


@dataclass(frozen=True, slots=True)
class ToLoop:
    event: LoopEvent


@dataclass(frozen=True, slots=True)
class StartRead:
    job: ReadJob


@dataclass(frozen=True, slots=True)
class AbandonRead:
    """Nobody wants this read any more; what it has not begun may be left. Its ReadDone must come all the same."""

    boot: str
    job: int


@dataclass(frozen=True, slots=True)
class StartPost:
    job: PostJob


@dataclass(frozen=True, slots=True)
class StartSums:
    job: SumJob


@dataclass(frozen=True, slots=True)
class DropLanded:
    """Nobody wants what landed: the chunk is free again."""

    boot: str
    landed: Landed


@dataclass(frozen=True, slots=True)
class ClosePair:
    """Nothing refers to this dead peer any more: close its mapping, destroy its agent."""

    boot: str


@dataclass(frozen=True, slots=True)
class ResetPair:
    """This living peer stalls with landing chunks of ours: destroy its agent (that frees them), then pair anew."""

    boot: str


class Metric(StrEnum):
    STALE_FRAMES = "tailrace_stale_frames_total"
    EXPIRED_READS = "tailrace_expired_reads_total"
    CORRUPT_PAGES = "tailrace_corrupt_pages_total"
    TRANSFER_BYTES = "tailrace_transfer_bytes_total"
    TRANSFER_SECONDS = "tailrace_transfer_seconds"
    BACKFLOW_OFFERS = "tailrace_backflow_offers_total"
    BACKFLOW_TOKENS = "tailrace_backflow_tokens_total"


@dataclass(frozen=True, slots=True)
class Measure:
    """Add to a counter, or observe a histogram."""

    metric: Metric
    value: float = 1
    labels: dict[str, str] = field(default_factory=dict)


Action = (
    ToPeer | ToRouter | ToIngress | ToLoop | StartRead | AbandonRead | StartPost | DropLanded | ClosePair | ResetPair
    | StartSums | Measure
)  # fmt: skip
