"""Ctx's half of the ucx transport: stations that have dialled, staging chunks, packing. See ucx.py."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import numpy as np

from tailrace.model.errors import PeerError
from tailrace.transfer import frames
from tailrace.transfer.messages import LandingGrant
from tailrace.transfer.transports.base import PageHook, PostDone, PostJob
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.copying import Helper
from tailrace.transfer.transports.landing import HEADER_BYTES
from tailrace.transfer.transports.nixl_agents import memory
from tailrace.transfer.transports.packing import PackJob
from tailrace.transfer.transports.reading import Mapped
from tailrace.transfer.transports.ucx_receive import ENVELOPE, Target, known_bytes
from tailrace.transfer.transports.ucx_thread import Ended, Sent, UcxThread

log = logging.getLogger(__name__)

_FRAME_BYTES, _FRAME_BYTES_PER_PAGE = 4096, 32  # a Landed frame takes less


class _Sender:
    """One peer's way out. A staging chunk is in `packing` by its number, then in `live` by its ticket."""

    def __init__(
        self, station: int, target: Target, info: bytes, page_bytes: int, conversion: Conversion | None
    ) -> None:
        self.station, self.target, self.info = station, target, info
        self.page_bytes, self.conversion = page_bytes, conversion
        self.link = None if conversion is None else conversion.link
        self.link = None if conversion is None else conversion.link
        self.waiting: deque[PostJob] = deque()
        self.packing: dict[int, PackJob] = {}
        self.live: dict[int, PackJob] = {}
        self.probe: int | None = None

    @property
    def num_staged(self) -> int:
        return len(self.packing) + len(self.live)

    def fits(self, grant: LandingGrant, num_pages: int) -> bool:
        in_range = 0 <= grant.chunk < self.target.num_chunks
        return in_range and 0 < num_pages * self.page_bytes <= self.target.room


class PostingSide:
    """Every pair in which this worker is ctx.

    Args:
        thread: sends.
        own: our pages and generation numbers.
        num_chunks, chunk_room: of the staging memory, which is allocated with the first pair. One peer occupies at
            most half of the chunks, so that a stalled one leaves room for the others.
        helper: packs; what it ends with is given to `packed`.
    """

    def __init__(
        self, thread: UcxThread, own: Mapped, num_chunks: int, chunk_room: int, helper: Helper, hook: PageHook | None
    ) -> None:
        self._thread, self._own, self._helper, self._hook = thread, own, helper, hook
        self._page_bytes = sum(pages.shape[1] for pages in own.pages)
        self._room = chunk_room
        frame_bytes = _FRAME_BYTES + _FRAME_BYTES_PER_PAGE * (chunk_room // min(p.shape[1] for p in own.pages))
        self._stride = HEADER_BYTES + chunk_room + frame_bytes
        self._num_chunks = num_chunks
        self._per_peer = max(1, num_chunks // 2)
        self._free = deque(range(num_chunks))
        self._staging: np.ndarray | None = None
        self._senders: dict[str, _Sender] = {}
        self._boots: dict[int, str] = {}  # by station
        self._orphans: dict[int, PackJob] = {}  # being packed for a peer that is gone
        self._read_by_ucx: dict[int, int] = {}  # ticket -> staging chunk, of a pair that is over
        self._done: list[PostDone] = []

    # --------------------------------------------------------------------------------------------------------- pairing

    def connect(self, boot: str, target: Target, info: bytes, conversion: Conversion | None = None) -> None:
        known = self._senders.get(boot)
        if known is not None and known.info == info:
            return
        if conversion is None and target.page_bytes != self._page_bytes:
            raise PeerError(f"pages of {boot} have {target.page_bytes} bytes, ours {self._page_bytes}")
        if target.room > self._room:
            raise PeerError(f"messages of {boot} take {target.room} bytes of pages, ours {self._room}")
        if not self._num_chunks:
            raise PeerError("this worker has no staging memory: ucx cannot read from it")
        self.disconnect(boot)
        if self._staging is None:
            self._staging = memory(self._num_chunks * self._stride)
        page_bytes = self._page_bytes if conversion is None else conversion.wire_page_bytes
        station = self._thread.dial(target.host, target.port, target.tag)
        sender = self._senders[boot] = _Sender(station, target, info, page_bytes, conversion)
        self._boots[station] = boot
        probe = known_bytes(target.token) + ENVELOPE.pack(target.token, 0)
        sender.probe = self._thread.send(station, np.frombuffer(probe, np.uint8))

    def disconnect(self, boot: str) -> None:
        """End the pair: what was posted is lost, the rest was never posted. Its staging stays until UCX is done."""
        sender = self._senders.pop(boot, None)
        if sender is None:
            return
        del self._boots[sender.station]
        for job in sender.waiting:
            self._end(job, "the pair ended")
        for slot, pack in sender.packing.items():
            pack.cancelled = True
            self._orphans[slot] = pack
            self._end(pack.job, "the pair ended")
        for ticket, pack in sender.live.items():
            self._read_by_ucx[ticket] = pack.slot
            self._end(pack.job, "the pair ended after this was posted", lost=True)
        self._thread.close_station(sender.station)

    # --------------------------------------------------------------------------------------------------------- posting

    def post(self, job: PostJob) -> None:
        sender = self._senders.get(job.boot)
        if sender is None:
            self._end(job, f"there is no pair with {job.boot}")
        elif not sender.fits(job.grant, len(job.pages)):
            self._end(job, f"{len(job.pages)} pages do not fit landing chunk {job.grant.chunk}")
        else:
            sender.waiting.append(job)
            self._fill()

    def packed(self, pack: PackJob) -> None:
        """The helper has ended a job: send what it packed."""
        if self._orphans.pop(pack.slot, None) is not None:
            self._free.append(pack.slot)
            return
        sender = self._senders[pack.job.boot]
        del sender.packing[pack.slot]
        if pack.landed is None:
            self._free.append(pack.slot)
            self._end(pack.job, pack.error or "not packed", stale=pack.stale)
            return
        frame = frames.pack(pack.landed)
        tail = frame + ENVELOPE.pack(sender.target.token, len(frame))
        start, chunk = HEADER_BYTES + pack.nbytes, self._chunk(pack.slot)
        if start + len(tail) > len(chunk):
            self._free.append(pack.slot)
            self._end(pack.job, f"what is said of {len(pack.landed.pages)} pages takes {len(frame)} bytes")
            return
        chunk[start : start + len(tail)] = np.frombuffer(tail, np.uint8)
        if sender.link is not None:
            sender.link.begun()
        if sender.link is not None:
            sender.link.begun()
        sender.live[self._thread.send(sender.station, chunk[: start + len(tail)])] = pack

    def sent(self, event: Sent) -> None:
        """UCX has ended a send."""
        slot = self._read_by_ucx.pop(event.ticket, None)
        if slot is not None:
            self._free.append(slot)
            return
        boot = self._boots.get(event.station)
        if boot is None:
            return
        sender = self._senders[boot]
        if event.ticket == sender.probe:
            sender.probe = None
        else:
            pack = sender.live.pop(event.ticket)
            self._free.append(pack.slot)
            if event.error is None:
                if sender.link is not None:
                    sender.link.ended(pack.nbytes)
                self._done.append(PostDone(pack.job.job, pack.job.key, codec_s=pack.use.seconds))
            else:
                self._end(pack.job, event.error, lost=event.posted)
        if event.error is not None:
            self._break(boot, event.error)

    def ended(self, event: Ended) -> None:
        boot = self._boots.get(event.station)
        if boot is not None:
            self._break(boot, event.error)

    def poll(self) -> list[PostDone]:
        self._fill()
        done, self._done = self._done, []
        return done

    def busy(self) -> bool:
        return bool(self._done or self._orphans or self._read_by_ucx) or any(
            s.waiting or s.packing or s.live or s.probe is not None for s in self._senders.values()
        )

    def close(self) -> None:
        for boot in list(self._senders):
            self.disconnect(boot)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _fill(self) -> None:
        """Give free staging chunks to waiting jobs, one peer after the other."""
        progress = True
        while self._free and progress:
            progress = False
            for sender in self._ready_senders():
                job = sender.waiting.popleft()
                slot = self._free.popleft()
                room = self._chunk(slot)[: HEADER_BYTES + self._room]
                pack = PackJob(job, slot, room, self._own, self._hook, sender.conversion)
                sender.packing[slot] = pack
                self._helper.submit(pack)
                progress = True

    def _ready_senders(self) -> Iterator[_Sender]:
        for sender in list(self._senders.values()):
            if self._free and sender.waiting and sender.num_staged < self._per_peer:
                yield sender

    def _chunk(self, slot: int) -> np.ndarray:
        assert self._staging is not None
        return self._staging[slot * self._stride : (slot + 1) * self._stride]

    def _break(self, boot: str, error: str) -> None:
        log.warning("pair_broken", extra={"fields": {"boot": boot, "error": error}})
        self.disconnect(boot)

    def _end(self, job: PostJob, error: str, *, stale: bool = False, lost: bool = False) -> None:
        self._done.append(PostDone(job.job, job.key, error, stale, lost))
