"""Ray moves the pages: the baseline of the benchmarks, through Ray's object store.

    gen   grants -> Want                          noticed -> LandedIn -> read -> [helper: get, check, unpack] -> taken
    ctx   post -> [helper: pack, look at generations, seal, put] -> its name over the pair's link -> taken -> PostDone

Ray moves whole tensors only: all the pages that one Want asks for are one object, as large as they are, in ctx's
layout. So what needs a form of its own on the wire (other layouts, tensor parallelism, codecs) is refused. What gen
gets is a copy of its own that nobody writes; gen copies from it into its pages. The owner keeps an object until gen has
said that it was taken or is not wanted, or the pair ends. If ctx dies, what gen had not got is lost and is recomputed.

This is not Ray Direct Transport: that needs an actor on both sides, and its NIXL agents keep a core busy in each
process; on CPUs the store is also the faster of the two.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import msgpack
import numpy as np

from tailrace.kv_cache.arena import Arena, ArenaGroup
from tailrace.model.errors import PeerError, ProtocolError
from tailrace.transfer import frames
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Landed, LandingGrant
from tailrace.transfer.transports.base import (
    ChunkCounts,
    LandedIn,
    PageHook,
    PeerNotice,
    PostDone,
    PostJob,
    ReadDone,
    ReadJob,
    Wake,
)
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.copying import Helper, Job
from tailrace.transfer.transports.landing import HEADER_BYTES, LandingBook
from tailrace.transfer.transports.packing import PackJob, UnpackJob
from tailrace.transfer.transports.ray_objects import NotYet, ObjectName, RayObjects
from tailrace.transfer.transports.reading import Mapped

log = logging.getLogger(__name__)

PROBE_BYTES = 4096
PROBE_LIMIT_S = 5.0
_GET_S = 0.02  # then other jobs of the helper have their turn
_INFO, _PUT, _TAKEN, _PROBE = "whole tensors 1", "put", "taken", "probe"


class _Probe:
    """What a ctx put to show that its objects can be got."""

    def __init__(self) -> None:
        self.named = threading.Event()
        self.name: ObjectName | None = None


class _PutJob(Job["_PutJob"]):
    """Pack, then put. `name` is None if there is nothing to be had, and `pack` says why."""

    def __init__(self, pack: PackJob, chunk: np.ndarray, objects: RayObjects) -> None:
        self.pack, self._chunk, self._objects = pack, chunk, objects
        self.reference: Any = None
        self.name: ObjectName | None = None

    def steps(self) -> Iterator[bool]:
        yield from self.pack.steps()
        if self.pack.landed is None:
            return
        try:
            self.reference, self.name = self._objects.put(self._chunk[: HEADER_BYTES + self.pack.nbytes])
        except PeerError as error:
            self.pack.error = str(error)

    def result(self) -> _PutJob:
        return self


class _GetJob(Job["_GetJob"]):
    """Get, then check and unpack."""

    def __init__(
        self, job: ReadJob, landed: Landed, name: ObjectName, own: tuple[np.ndarray, ...], objects: RayObjects,
        hook: PageHook | None,
    ) -> None:  # fmt: skip
        self.job, self.landed = job, landed
        self.given_up: str | None = None  # set by the transfer thread: not begun, it ends with this
        self._name, self._own, self._objects, self._hook = name, own, objects, hook
        self._unpack: UnpackJob | None = None

    def steps(self) -> Iterator[bool]:
        try:
            reference = self._objects.named(self._name)
            while self.given_up is None:
                try:
                    chunk = self._objects.get(reference, _GET_S)
                    break
                except NotYet:
                    yield False
            else:
                return
        except PeerError as error:
            self.given_up = str(error)
            return
        self._unpack = UnpackJob(self.job, self.landed, chunk, self._own, self._hook)
        yield from self._unpack.steps()

    def result(self) -> _GetJob:
        return self

    @property
    def done(self) -> ReadDone:
        if self._unpack is None:
            return ReadDone(self.job.job, self.job.key, (), (), self.given_up)
        return self._unpack.result()


class RayTransport:
    """Both sides of every ray pair of a worker.

    Args:
        arena: our pages, which we alone write.
        objects: our place in the running Ray.
        num_chunks: objects that peers may have put for us at once; 0 for a worker that never reads.
        wake: called when `poll` has something new.
        hook: tests only.
    """

    name = "ray"
    reads_survive_death = False

    def __init__(
        self,
        arena: Arena | ArenaGroup,
        objects: RayObjects,
        num_chunks: int = 8,
        *,
        wake: Wake | None = None,
        hook: PageHook | None = None,
    ) -> None:
        ranks = arena if isinstance(arena, ArenaGroup) else ArenaGroup([arena])
        self._own = Mapped(ranks.pages, ranks.generations)
        self._page_bytes = sum(ranks.bytes_per_page)
        self.units_per_grant = ranks.num_pages
        self.corrupt_chunks = self.stale_notifications = 0
        self._objects, self._hook, self._num_chunks = objects, hook, num_chunks
        self._book = LandingBook(num_chunks, ranks.num_pages * self._page_bytes)
        self._helper: Helper[_PutJob | _GetJob] = Helper("ray-objects", wake)
        self._tokens: dict[str, bytes] = {}  # of the pairs in which we are gen
        self._probes: dict[str, _Probe] = {}
        self._gens: dict[str, tuple[bytes, Any]] = {}  # of those in which we are ctx: info, the probe's reference
        self._named: dict[int, tuple[str, Landed, ObjectName]] = {}  # by sequence number: nobody reads it yet
        self._gets: dict[int, _GetJob] = {}
        self._puts: dict[int, _PutJob] = {}
        self._kept: dict[tuple[str, int], _PutJob] = {}  # by (gen, sequence number): put and not yet taken
        self._events: list[ReadDone | PostDone | LandedIn | PeerNotice] = []

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str) -> bytes:
        """A token for the probe, and the size of our pages; empty if we receive nothing."""
        if not self._num_chunks:
            return b""
        if boot not in self._tokens:
            self._tokens[boot] = secrets.token_bytes(16)
            self._probes[boot] = _Probe()
        return bytes(msgpack.packb([_INFO, self._tokens[boot], self._page_bytes]) or b"")

    def connect(self, boot: str, info: bytes, conversion: Conversion | None = None) -> None:
        if conversion is not None or len(self._own.pages) > 1:
            raise PeerError("ray moves whole tensors: pages must be alike, of one rank, without a codec")
        if not info:
            return  # it receives nothing
        try:
            name, token, page_bytes = msgpack.unpackb(info)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise PeerError(f"the peer's ray info is malformed: {error}") from None
        if name != _INFO or type(token) is not bytes or type(page_bytes) is not int:
            raise PeerError("the peer's ray info is malformed or of another version")
        if page_bytes != self._page_bytes:
            raise PeerError(f"pages of {boot} have {page_bytes} bytes, ours {self._page_bytes}")
        if boot in self._gens and self._gens[boot][0] == info:
            self._tell_again(boot)
            return
        self._end_gen(boot)
        reference, probe = self._objects.put(_known_bytes(token))
        self._gens[boot] = (info, reference)
        self._tell(boot, True, [_PROBE, list(astuple(probe))])

    def units_in_grant(self, boot: str) -> int:
        return self.units_per_grant

    def probe(self, boot: str) -> bool:
        """Blocks for at most 5 s while the transfer thread polls: call it from another thread."""
        probe, token = self._probes.get(boot), self._tokens.get(boot)
        if probe is None or token is None or not probe.named.wait(PROBE_LIMIT_S) or probe.name is None:
            return False
        try:
            data = self._objects.get(self._objects.named(probe.name), PROBE_LIMIT_S)
        except (PeerError, NotYet) as error:
            log.warning("ray_probe_failed", extra={"fields": {"boot": boot, "reason": str(error)}})
            return False
        return data.tobytes() == _known_bytes(token).tobytes()

    def disconnect(self, boot: str) -> None:
        """What was put for the peer goes, and what it still names is not taken."""
        self._tokens.pop(boot, None)
        self._probes.pop(boot, None)
        self._book.disconnect(boot)
        for get in self._gets.values():
            if get.job.boot == boot:
                get.given_up = "the pair ended"
        self._end_gen(boot)

    def _end_gen(self, boot: str) -> None:
        if self._gens.pop(boot, None) is None:
            return
        for put in self._puts.values():
            if put.pack.job.boot == boot:
                put.pack.cancelled = True
        for key, put in [item for item in self._kept.items() if item[0][0] == boot]:
            del self._kept[key]
            self._end(put.pack.job, "the pair ended after this was posted", lost=True)

    def noticed(self, boot: str, data: bytes) -> None:
        """What the peer's half said over the pair's link. Raises PeerError if it is nothing of ours."""
        try:
            kind, *rest = msgpack.unpackb(data)
            if kind == _PROBE:
                probe = self._probes.get(boot, _Probe())
                probe.name = ObjectName(*rest[0])
                probe.named.set()
            elif kind == _PUT:
                self._put_there(boot, frames.unpack(rest[0]), ObjectName(*rest[1]))
            elif kind == _TAKEN:
                self._taken(boot, int(rest[0]))
        except (ValueError, TypeError, IndexError, ProtocolError, msgpack.UnpackException) as error:
            raise PeerError(f"{boot} said what is no notice of the ray transport: {error}") from None

    # ------------------------------------------------------------------------------------------------------------- gen

    def _put_there(self, boot: str, landed: Any, name: ObjectName) -> None:
        if not isinstance(landed, Landed):
            raise ProtocolError(f"{type(landed).__name__} does not name what was put")
        if landed.sequence in self._named or any(get.landed.sequence == landed.sequence for get in self._gets.values()):
            return  # said again after the link had broken
        if boot in self._tokens and self._book.announce(boot, landed):
            self._named[landed.sequence] = (boot, landed, name)
            self._events.append(LandedIn(boot, landed))
        else:
            self.stale_notifications += 1
            self._tell(boot, False, [_TAKEN, landed.sequence])

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        return self._book.grant(key, boot, n, self.units_per_grant) if boot in self._tokens else ()

    def read(self, job: ReadJob) -> None:
        landed = job.landed
        if landed is None or not self._book.begin_unpack(landed):
            self._events.append(ReadDone(job.job, job.key, (), (), "nothing of this grant has landed"))
            return
        _, _, name = self._named.pop(landed.sequence)
        get = _GetJob(job, landed, name, self._own.pages, self._objects, self._hook)
        self._gets[job.job] = get
        self._helper.submit(get)

    def abandon(self, boot: str, job: int) -> None:
        get = self._gets.get(job)
        if get is not None:
            get.given_up = get.given_up or "abandoned"

    def drop_landed(self, boot: str, landed: Landed) -> None:
        self._book.drop(landed)
        if self._named.pop(landed.sequence, None) is not None:
            self._tell(boot, False, [_TAKEN, landed.sequence])

    def reclaim(self, key: Key, boot: str) -> None:
        self._book.reclaim(key, boot)
        for sequence, (owner, landed, _) in list(self._named.items()):
            if owner == boot and (landed.request, landed.attempt) == key:
                del self._named[sequence]
                self._tell(boot, False, [_TAKEN, sequence])

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        """The memory of a dead peer cannot be seen."""
        return False

    # ------------------------------------------------------------------------------------------------------------- ctx

    def post(self, job: PostJob) -> None:
        if job.boot not in self._gens:
            self._end(job, f"there is no pair with {job.boot}")
            return
        nbytes = len(job.pages) * self._page_bytes
        if not 0 < nbytes <= job.grant.nbytes:
            self._end(job, f"{len(job.pages)} pages do not fit landing chunk {job.grant.chunk}")
            return
        chunk = np.empty(HEADER_BYTES + nbytes, np.uint8)
        chunk[:HEADER_BYTES] = 0
        put = _PutJob(PackJob(job, 0, chunk, self._own, self._hook), chunk, self._objects)
        self._puts[job.job] = put
        self._helper.submit(put)

    def _was_put(self, put: _PutJob) -> None:
        pack = put.pack
        job = pack.job
        del self._puts[job.job]
        if pack.cancelled or job.boot not in self._gens:
            self._end(job, "the pair ended")
        elif pack.landed is None or put.name is None:
            self._end(job, pack.error or "not packed", stale=pack.stale)
        else:
            self._kept[job.boot, job.grant.sequence] = put
            self._tell_put(job.boot, put)

    def _tell_put(self, boot: str, put: _PutJob) -> None:
        assert put.name is not None and put.pack.landed is not None
        self._tell(boot, True, [_PUT, frames.pack(put.pack.landed), list(astuple(put.name))])

    def _tell_again(self, boot: str) -> None:
        """A new link: what went over the old one may be lost."""
        for (gen, _), put in self._kept.items():
            if gen == boot:
                self._tell_put(boot, put)

    def _taken(self, boot: str, sequence: int) -> None:
        put = self._kept.pop((boot, sequence), None)
        if put is not None:
            self._events.append(PostDone(put.pack.job.job, put.pack.job.key))

    def _end(self, job: PostJob, error: str, *, stale: bool = False, lost: bool = False) -> None:
        self._events.append(PostDone(job.job, job.key, error, stale, lost))

    # ------------------------------------------------------------------------------------------------------------ both

    def poll(self) -> list[ReadDone | PostDone | LandedIn | PeerNotice]:
        for result in self._helper.drain():
            if isinstance(result, _PutJob):
                self._was_put(result)
            else:
                self._was_got(result)
        events, self._events = self._events, []
        return events

    def _was_got(self, get: _GetJob) -> None:
        del self._gets[get.job.job]
        self._book.end_unpack(get.landed)
        done = get.done
        if done.error == "corrupt":
            self.corrupt_chunks += 1
            log.warning("corrupt_chunk", extra={"fields": {"boot": get.job.boot, "chunk": get.landed.chunk}})
        self._events.append(done)
        self._tell(get.job.boot, False, [_TAKEN, get.landed.sequence])

    def _tell(self, boot: str, to_gen: bool, what: list[Any]) -> None:
        self._events.append(PeerNotice(self.name, boot, to_gen, bytes(msgpack.packb(what) or b"")))

    def busy(self) -> bool:
        return bool(self._events or self._gets or self._puts or self._kept)

    def counts(self) -> ChunkCounts:
        return self._book.counts()

    def check(self) -> None:
        """Raises LedgerError if the law of the landing chunks is broken."""
        self._book.check()

    def close(self) -> None:
        for get in self._gets.values():
            get.given_up = get.given_up or "the worker stops"
        self._helper.close()
        self._kept.clear()
        self._gens.clear()
        self._objects.close()


def _known_bytes(token: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(token).digest(PROBE_BYTES), np.uint8)
