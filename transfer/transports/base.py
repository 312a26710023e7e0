"""What the protocol cores and the node may ask of a transport: the moving of pages between two pools, and nothing else.

    reading transports (`shm`, `in_process`)   gen copies out of ctx's arena by itself: `lands` is False
    landing transports (`nixl`)                ctx writes into chunks that gen granted, gen unpacks: `lands` is True

One object a rank process and transport on each side: a *sink* at gen, a *source* at ctx (a worker of duty `both` has the
two). Nobody but gen ever writes gen's pages. Every method is called from the transfer thread and returns at once (`retire`
may take 0.1 s); copies run in helper threads, and what came of them is fetched by `poll`. No frame is sent from here: what
the other side must know goes through `info_for` (in Hello), LandingGrant (in Want), and the landing notification.

Pairing, gen dials:
    gen    hello.transports[name] = sink.info_for(ctx_boot)
    ctx    source.connect(gen_boot, that); answers with hello.transports[name] = source.info_for(gen_boot)
    gen    sink.connect(ctx_boot, that)
After `retire(boot)` at one side the pair must be made anew from its Hello on; the other side retires too.

A request at gen:
    sink.open(key, ctx_boot, destinations)
    reading:  sink.read(key, pages) for each Ready          -> one ReadDone for each call
    landing:  sink.grant(key, n) for each Want              -> one ReadDone for each chunk that landed
    sink.close(key)                                         -> one Closed, and nothing after it
`close` is for every end, good or bad. Until Closed comes, a copy of our own may still write the destinations: the pages
that were not handed to the loop stay quarantined so long. It ends no running copy early; it drops those not yet begun.

A request at ctx (landing only):
    source.post(PostJob) for each grant that is filled      -> one PostDone for each job
    source.cancel(key, gen_boot)                            jobs not yet posted come back as `not_posted`
When ctx tells gen that it is through with a key (Valid, Expired, or Fail `not_posted` as the answer to gen's giving up) it
has first waited for the PostDone of every job of that key; gen then calls `sink.ungrant(key)`, and the chunks that were
granted and not used are free again. A job that comes back `lost` may still land: only `retire` gives its chunk back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tailrace.transfer.messages import LandingGrant, PageDescriptor

Key = tuple[str, int]
"""(request, attempt)."""

Wake = Callable[[], None]
"""Called from a helper thread when `poll` has something new; must be thread-safe and quick."""


@dataclass(frozen=True, slots=True)
class ReadDone:
    """One read job, or one landed chunk, whose copy has returned. Every page of it stands in exactly one of three.

    Attributes:
        ok: copied, and their generation numbers were unchanged after the copy.
        stale: their generation number has changed; what was copied is worthless and the page will not come back.
        failed: not copied, or copied wrongly; may be asked for again. `error` says why.
        error: None unless something failed: `read` (fault, peer's memory gone), `corrupt` (checksum or header differs).
        nbytes: bytes that crossed the wire for this job.
        seconds: from the job's start to the copy's return.
    """

    key: Key
    boot: str
    ok: tuple[PageDescriptor, ...]
    stale: tuple[PageDescriptor, ...]
    failed: tuple[PageDescriptor, ...]
    error: str | None
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing of this transport writes the destinations of `key` any more, or ever will."""

    key: Key


@dataclass(frozen=True, slots=True)
class PostJob:
    """Pages for one landing chunk, at most `grant.nbytes // bytes_per_page` of them."""

    key: Key
    boot: str  # of the gen that granted
    grant: LandingGrant
    pages: tuple[PageDescriptor, ...]


class PostOutcome(StrEnum):
    DONE = "done"  # in gen's landing chunk, notification sent
    NOT_POSTED = "not_posted"  # not one byte was or will be written: gen may grant the chunk again
    LOST = "lost"  # posted, and then an error: it may have landed or may land yet


@dataclass(frozen=True, slots=True)
class PostDone:
    """A post job has ended. `stale`: pages whose generation number changed while packing (then it is `not_posted`)."""

    job: PostJob
    outcome: PostOutcome
    stale: tuple[PageDescriptor, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class LandingCounts:
    """Landing chunks by state: free + granted + unpacking == total."""

    free: int
    granted: int
    unpacking: int
    total: int


class TransportFaults(Protocol):
    """Tests: what may be made to go wrong. Asked from helper threads, so it must be thread-safe; None means no faults."""

    def held(self, key: Key, ordinal: int) -> bool:
        """HOLD: the copy of this page must not begin yet; asked again about each millisecond."""
        ...

    def failed(self, key: Key, what: str, ordinal: int) -> bool:
        """FAIL: `what` is `read` (the copy of this page fails) or `post` (a landing write that begins with it)."""
        ...

    def seconds_for(self, nbytes: int) -> float:
        """SLOW: seconds that this many bytes take at least; 0.0 is full speed."""
        ...

    def deliveries(self, key: Key) -> tuple[float, ...]:
        """DROP, DUP, LATE of a landing notification: after how many seconds it is delivered, each time; (0.0,) is right."""
        ...


class SinkTransport(Protocol):
    """Gen's side: everything that writes into gen's pages."""

    name: str
    lands: bool

    def info_for(self, boot: str) -> bytes:
        """What the ctx of this boot id needs (goes into our Hello); makes what the pair needs here."""
        ...

    def connect(self, boot: str, info: bytes) -> None:
        """The pair can be used from here on. Raises PeerError if the info is malformed or the memory is not there."""
        ...

    def open(self, key: Key, boot: str, destinations: Mapping[tuple[int, int], int]) -> None:
        """Reads of `key` from `boot` may come; page (group, ordinal) shall stand in page destinations[group, ordinal]."""
        ...

    def read(self, key: Key, pages: Sequence[PageDescriptor]) -> None:
        """Reading transports: copy these pages to their destinations. Pages without a destination are ignored."""
        ...

    def grant(self, key: Key, n: int) -> tuple[LandingGrant, ...]:
        """Landing transports: at most n free chunks, now granted to (boot, key) and nobody else; fewer if fewer are free.

        Empty for reading transports.
        """
        ...

    def ungrant(self, key: Key) -> None:
        """Ctx said that nothing it posted for `key` is still under way: chunks granted to it and not used are free."""
        ...

    def close(self, key: Key) -> None:
        """No more reads of `key`; answered by one Closed, also for a key that is not open.

        Chunks granted to the key stay granted until `ungrant`, their notification, or `retire`.
        """
        ...

    def poll(self) -> list[ReadDone | Closed]:
        """What has ended since the last call; never blocks. Call about each millisecond while `in_flight`."""
        ...

    def still_valid(self, boot: str, pages: Sequence[PageDescriptor]) -> bool | None:
        """Whether the pages still have their generation numbers in memory that outlives ctx; None: cannot be known."""
        ...

    def retire(self, boot: str) -> None:
        """End the pair. On return nothing that `boot` ever posted can land, so chunks granted to it are free again.

        Jobs of that boot not yet begun fail (ReadDone, error `read`); running copies end by themselves. For a pair that is
        dead or stalled, because every transfer of the pair ends with it.
        """
        ...

    @property
    def in_flight(self) -> int:
        """Jobs, unpacks and granted chunks that are not over: while above 0, `poll` must be called."""
        ...

    @property
    def pages_per_chunk(self) -> int:
        """Pages that fit into one landing chunk; 0 for reading transports."""
        ...

    def landing_counts(self) -> LandingCounts:
        """All zero for reading transports."""
        ...

    def check(self) -> None:
        """Raises LedgerError unless the law of LandingCounts holds."""
        ...

    def shutdown(self) -> None:
        """End helper threads and give back memory, at the end of the process's transfer thread."""
        ...


class SourceTransport(Protocol):
    """Ctx's side: lets pages be read, or posts them into landing chunks. Never writes its own pages."""

    name: str
    lands: bool

    def info_for(self, boot: str) -> bytes:
        """What the gen of this boot id needs (goes into our Hello)."""
        ...

    def connect(self, boot: str, info: bytes) -> None:
        """Take what gen's Hello said. Raises PeerError if it is malformed or gen's memory cannot be reached."""
        ...

    def post(self, job: PostJob) -> None:
        """Landing transports: pack the pages and write them into the granted chunk. Jobs of a boot go in order."""
        ...

    def cancel(self, key: Key, boot: str) -> None:
        """Jobs of (key, boot) that are not yet posted end as `not_posted`; the others end by themselves."""
        ...

    def poll(self) -> list[PostDone]:
        """Posts what is packed; returns what has ended. Call about each millisecond while `in_flight`."""
        ...

    def retire(self, boot: str) -> None:
        """End the pair; every job of that boot ends: `not_posted` if it was not posted, else `lost`."""
        ...

    @property
    def in_flight(self) -> int:
        """Above 0 while `poll` must be called."""
        ...

    def shutdown(self) -> None:
        """End helper threads and give back memory."""
        ...
