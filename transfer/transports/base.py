"""What a transport is: the moving of pages between two workers that are paired. Types and one Protocol, torch-free.

Two kinds. A *reading* transport (shm, in_process): gen copies out of ctx's pages, then re-reads their generation
numbers. A *landing* transport (nixl): gen grants landing chunks, ctx packs pages and writes them there, gen unpacks. In
both no process ever writes into another's pool, and a job is finished only when its own copy has returned: nothing that
happens to its request ends it early, because that is what quarantine waits for.

Pairing, gen dials:
    gen    hello.transports[name] = transport.info_for(ctx_boot)
    ctx    transport.connect(gen_boot, that); its own hello.transports[name] = transport.info_for(gen_boot)
    gen    transport.connect(ctx_boot, that)
A pair may be made anew at any time by doing this again: what is under way goes on if neither side has disconnected, and
is `lost` at ctx if gen has.

Everything here is called from the transfer thread and returns at once, but for `probe`, and `disconnect`, which may
take 0.1 s. If a peer dies its jobs come to an end by themselves (`reads_survive_death`) or by `disconnect`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from tailrace.transfer.codec_choice import RAW
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Landed, LandingGrant, PageDescriptor
from tailrace.transfer.page_plan import Destination

if TYPE_CHECKING:
    from tailrace.transfer.transports.conversion import Conversion

Wake = Callable[[], None]
"""Called from a helper thread when `poll` has something new: thread-safe and quick."""


class CopyFailed(Exception):
    """Raised by a PageHook: this page cannot be copied."""


PageHook = Callable[[Key, PageDescriptor], bool]
"""Tests: called in the helper thread before each page is copied, packed or unpacked; pages then go one by one.

True: go on. False: not yet, ask again in about a millisecond, other jobs go on (HOLD). It may also sleep (SLOW) or
raise CopyFailed (FAIL).
"""


def spoil(hook: PageHook | None, place: str, ordinal: int, data: np.ndarray) -> None:
    """Tests: a page [bytes] uint8 of this ordinal stands in `data` now; a hook that knows how may change it (FLIP)."""
    flip = getattr(hook, "spoil", None)
    if flip is not None:
        flip(place, ordinal, data)


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Bring units into our pages.

    Attributes:
        units: (ctx's page, our page). Where a pair's pages differ `into` says where their tokens go, and our page is
            only the first of those that a unit reaches into.
        landed: unpack them from that landing chunk.
        into: by absolute position; needed where the pair has a Conversion.
    """

    job: int
    key: Key
    boot: str
    units: Sequence[tuple[PageDescriptor, int]]
    landed: Landed | None = None
    into: Destination | None = None


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The one answer to a ReadJob: none of its copies can write any more.

    `units_stale`: their generation changed, our page holds nothing of use. With `error` set, units that stand in
    neither list failed. `wire_bytes`: what was read of the peer's memory, or landed; `logical_bytes`: what it is worth
    in our pages. `codec`: through which they came, which worked `codec_s` here; `step`: what it lost, empty if nothing.
    """

    job: int
    key: Key
    units_ok: Sequence[PageDescriptor]
    units_stale: Sequence[PageDescriptor] = ()
    error: str | None = None
    wire_bytes: int = 0
    logical_bytes: int = 0
    codec: str = RAW
    codec_s: float = 0.0
    step: str = ""


@dataclass(frozen=True, slots=True)
class PostJob:
    """Pack our pages, check their generations after that, write them into gen's landing chunk and notify."""

    job: int
    key: Key
    boot: str
    pages: Sequence[PageDescriptor]
    grant: LandingGrant


@dataclass(frozen=True, slots=True)
class PostDone:
    """The one answer to a PostJob.

    With `error` set and not `lost`, nothing of it is under way, or will be: ctx may say Fail `not_posted`. `lost`: it
    was posted, then the connection failed, so it may have landed or land yet: ctx says Fail `transfer`, and gen, if
    that key still has chunks out, must end the pair (`disconnect`) before it grants them again. `stale`: a page had
    changed.
    `codec_s`: for which a codec worked on it.
    """

    job: int
    key: Key
    error: str | None = None
    stale: bool = False
    lost: bool = False
    codec_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LandedIn:
    """A landing write's notification came from this peer and names a chunk granted to it and its key.

    Answer by `read` (a job with this `landed`) or `drop_landed`; until then the chunk counts as unpacking.
    """

    boot: str
    landed: Landed


@dataclass(frozen=True, slots=True)
class PeerNotice:
    """To be told to a peer's transport of the same name over the pair's link, which may lose it with itself.

    `to_gen`: said by ctx's half.
    """

    transport: str
    boot: str
    to_gen: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Landing chunks of this worker: free + granted + unpacking == total."""

    free: int = 0
    granted: int = 0
    unpacking: int = 0
    total: int = 0


class Transport(Protocol):
    """One way to move pages, with all peers of a worker.

    Attributes:
        name: as in Hello.transports and in metrics.
        reads_survive_death: a dead peer's pages can still be read, until `disconnect`.
        units_per_grant: pages like our own that fit a landing chunk; 0 if this transport reads.
    """

    name: str
    reads_survive_death: bool
    units_per_grant: int

    def info_for(self, boot: str) -> bytes:
        """What this peer needs to connect; makes what the pair needs here (an agent of its own)."""
        ...

    def connect(self, boot: str, info: bytes, conversion: Conversion | None = None) -> None:
        """Make a peer reachable; the same info again changes nothing. Raises PeerError if it cannot be reached so.

        `conversion`: how pages get from ctx to gen where theirs differ; without it they must be alike.
        """
        ...

    def units_in_grant(self, boot: str) -> int:
        """Gen: pages of this ctx that a landing chunk takes; 0 if this transport reads."""
        ...

    def probe(self, boot: str) -> bool:
        """Gen: whether one page of known bytes comes over intact. May block; called off the hot path, in a thread."""
        ...

    def disconnect(self, boot: str) -> None:
        """Close the mapping, or destroy the agent; jobs of that peer are all reported. Unknown boots are ignored.

        On return nothing that the peer ever posted can land any more, so the chunks granted to it are free. Copies of
        our own that run end by themselves, those not begun fail; what has landed already can still be unpacked.
        """
        ...

    def read(self, job: ReadJob) -> None:
        """Copy, or unpack; answered by one ReadDone. Error `corrupt`: the chunk is not as it was announced."""
        ...

    def abandon(self, boot: str, job: int) -> None:
        """Nobody wants this read any more: a copy that has not begun may fail (error `abandoned`) at once."""
        ...

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        """Whether the peer's (page, generation) stand unchanged in its memory; False where that cannot be seen."""
        ...

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        """Gen: up to n free landing chunks for this attempt; as many as there are."""
        ...

    def drop_landed(self, boot: str, landed: Landed) -> None:
        """Gen: nobody wants what landed; its chunk is free again."""
        ...

    def reclaim(self, key: Key, boot: str) -> None:
        """Gen: ctx has said that it posts no more for this attempt; its chunks without a notification are free."""
        ...

    def post(self, job: PostJob) -> None:
        """Ctx: pack, write, notify; answered by one PostDone. Jobs of one peer are posted in order."""
        ...

    def poll(self) -> Sequence[ReadDone | PostDone | LandedIn | PeerNotice]:
        """Everything that came to its end since the last call."""
        ...

    def busy(self) -> float:
        """Whether `poll` may have something soon: a job under way, or a landing chunk out. Not 0, then.

        A fraction of a millisecond says, in seconds, that polling so soon pays; True leaves it to the caller.
        """
        ...

    def counts(self) -> ChunkCounts: ...

    def close(self) -> None:
        """Every peer, helper thread and mapping of this transport. Waits for copies under way."""
        ...


@runtime_checkable
class HearsNotices(Protocol):
    """A transport whose halves talk over the pair's link."""

    def noticed(self, boot: str, data: bytes) -> None:
        """What the peer's half said. Raises PeerError if it is nothing of ours."""
        ...
