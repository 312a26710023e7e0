"""Ctx's half of the nixl transport: agents that send, staging chunks, packing. See nixl.py."""

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
from tailrace.transfer.transports.nixl_agents import Agent, NotPosted, Write, memory
from tailrace.transfer.transports.nixl_receive import PROBE, PROBE_BYTES, Target, known_bytes
from tailrace.transfer.transports.packing import PackJob, may_go_directly
from tailrace.transfer.transports.reading import Mapped

log = logging.getLogger(__name__)

_AHEAD = 1  # chunks of a peer that are packed beside the write of one; more would hold a core that the write needs
_LINGER_S = 0.5  # a write is done before its notification has left our socket buffer, and only polling moves that on


class _Sender:
    """One peer's way out. A staging chunk is in `packing`, then in `live`, by its number."""

    def __init__(
        self,
        name: str,
        target: Target,
        info: bytes,
        regions: list[np.ndarray],
        page_bytes: int,
        conversion: Conversion | None,
        direct: bool,
    ) -> None:
        self.direct = direct
        self.target, self.info, self.page_bytes, self.conversion = target, info, page_bytes, conversion
        self._probe_area = memory(PROBE_BYTES)
        self._probe_area[:] = np.frombuffer(known_bytes(target.agent), np.uint8)
        self.agent = Agent(name, [*regions, self._probe_area])
        self.remote = self.agent.load(target.metadata)
        self.waiting: deque[PostJob] = deque()
        self.packing: dict[int, PackJob] = {}
        self.live: dict[int, tuple[PackJob, Write]] = {}
        self.linger_until = float("-inf")
        self.link = None if conversion is None else conversion.link
        self.probe: Write | None = self.agent.write([self._probe_area], self.remote, target.probe_address, PROBE)

    @property
    def num_staged(self) -> int:
        return len(self.packing) + len(self.live)

    def fits(self, grant: LandingGrant, num_pages: int) -> bool:
        in_range = 0 <= grant.chunk < self.target.num_chunks
        return in_range and 0 < num_pages * self.page_bytes <= self.target.room


class PostingSide:
    """Every pair in which this worker is ctx.

    Args:
        boot: our boot id.
        own: our pages and generation numbers.
        num_chunks, chunk_room: of the staging memory, which is allocated with the first pair. One peer occupies at
            most three quarters of the chunks, so that a stalled one leaves room for the others.
        helper: packs; what it ends with is given to `packed`.
    """

    def __init__(
        self, boot: str, own: Mapped, num_chunks: int, chunk_room: int, helper: Helper, hook: PageHook | None
    ) -> None:
        self._boot, self._own, self._helper, self._hook = boot, own, helper, hook
        self._page_bytes = sum(pages.shape[1] for pages in own.pages)
        self._stride = HEADER_BYTES + chunk_room
        self._num_chunks = num_chunks
        self._per_peer = max(1, num_chunks - max(1, num_chunks // 4))
        self._free = deque(range(num_chunks))
        self._staging: np.ndarray | None = None
        self._senders: dict[str, _Sender] = {}
        self._made = 0
        self._orphans: dict[int, PackJob] = {}  # being packed for a peer that is gone
        self._done: list[PostDone] = []

    # --------------------------------------------------------------------------------------------------------- pairing

    def connect(self, boot: str, target: Target, info: bytes, conversion: Conversion | None = None) -> None:
        known = self._senders.get(boot)
        if known is not None and known.info == info:
            return
        if conversion is None and target.page_bytes != self._page_bytes:
            raise PeerError(f"pages of {boot} have {target.page_bytes} bytes, ours {self._page_bytes}")
        if target.room > self._stride - HEADER_BYTES:
            raise PeerError(f"chunks of {boot} take {target.room} bytes of pages, ours {self._stride - HEADER_BYTES}")
        if not self._num_chunks:
            raise PeerError("this worker has no staging memory: nixl cannot read from it")
        self.disconnect(boot)
        if self._staging is None:
            self._staging = memory(self._num_chunks * self._stride)
        self._made += 1
        page_bytes = self._page_bytes if conversion is None else conversion.wire_page_bytes
        name = f"{self._boot}>{boot}#{self._made}"
        direct = may_go_directly(self._own, self._hook, conversion)
        regions = [self._staging, *(self._own.pages if direct else ())]
        self._senders[boot] = _Sender(name, target, info, regions, page_bytes, conversion, direct)

    def disconnect(self, boot: str) -> None:
        """End the pair: what was posted is lost, the rest was never posted."""
        sender = self._senders.pop(boot, None)
        if sender is None:
            return
        for job in sender.waiting:
            self._end(job, "the pair ended")
        for slot, pack in sender.packing.items():
            pack.cancelled = True
            self._orphans[slot] = pack
            self._end(pack.job, "the pair ended")
        lost = [(slot, pack) for slot, (pack, _) in sender.live.items()]
        sender.live.clear()
        sender.probe = None
        sender.agent.destroy()
        for slot, pack in lost:
            self._free.append(slot)
            self._end(pack.job, "the pair ended after this was posted", lost=True)

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

    def packed(self, pack: PackJob, now: float) -> None:
        """The helper has ended a job: post what it packed."""
        if self._orphans.pop(pack.slot, None) is not None:
            self._free.append(pack.slot)
            return
        sender = self._senders[pack.job.boot]
        del sender.packing[pack.slot]
        if pack.landed is None:
            self._free.append(pack.slot)
            self._end(pack.job, pack.error or "not packed", stale=pack.stale)
            return
        sender.live[pack.slot] = (pack, Write())
        self._fill()  # the helper packs another while this one is written
        address = sender.target.address + pack.job.grant.chunk * sender.target.stride
        if sender.link is not None:
            sender.link.begun()
        try:
            word = b"" if pack.direct else frames.pack(pack.landed)
            handle = sender.agent.write(pack.sources, sender.remote, address, word)
        except NotPosted as error:
            del sender.live[pack.slot]
            self._free.append(pack.slot)
            self._end(pack.job, str(error))
            self._break(pack.job.boot, error)
        except PeerError as error:
            self._break(pack.job.boot, error)
        else:
            sender.live[pack.slot] = (pack, handle)
            self._advance(pack.job.boot, now)  # the write may have taken long: what is done makes room for the helper
            self._fill()

    def poll(self, now: float) -> list[PostDone]:
        for boot in list(self._senders):
            self._advance(boot, now)
        self._fill()
        done = self._done
        self._done = []
        return done

    def busy(self, now: float) -> bool:
        return bool(self._done or self._orphans) or any(
            s.waiting or s.packing or s.live or s.probe is not None or now < s.linger_until
            for s in self._senders.values()
        )

    def close(self) -> None:
        for boot in list(self._senders):
            self.disconnect(boot)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _advance(self, boot: str, now: float) -> None:
        sender = self._senders[boot]
        try:
            if sender.probe is not None and sender.agent.is_done(sender.probe):
                sender.agent.release(sender.probe)
                sender.probe = None
                sender.linger_until = now + _LINGER_S
            if self._collect(sender):
                sender.linger_until = now + _LINGER_S
            if not sender.live and now < sender.linger_until:
                sender.agent.notifications()  # moves the last notification on
        except PeerError as error:
            self._break(boot, error)

    def _collect(self, sender: _Sender) -> bool:
        """Take what is done, the oldest first, as far as it is; whether there was any."""
        before = len(self._done)
        for slot, (pack, handle) in list(sender.live.items()):
            if not sender.agent.is_done(handle):
                break
            sender.agent.release(handle)
            if sender.link is not None:
                sender.link.ended(pack.nbytes)
            told = not pack.direct or pack.is_unchanged()
            if pack.direct and told:
                sender.agent.notify(sender.remote, frames.pack(pack.landed))
            del sender.live[slot]
            self._free.append(slot)
            if told:
                self._done.append(PostDone(pack.job.job, pack.job.key, codec_s=pack.use.seconds))
            else:  # all of it has landed, and nobody will be told
                self._end(pack.job, "a page was used anew before it was sent", stale=True)
        return len(self._done) > before

    def _fill(self) -> None:
        """Give free staging chunks to waiting jobs, one peer after the other."""
        progress = True
        while self._free and progress:
            progress = False
            for sender in self._ready_senders():
                job = sender.waiting.popleft()
                slot = self._free.popleft()
                pack = PackJob(
                    job, slot, self._chunk(slot), self._own, self._hook, sender.conversion, direct=sender.direct
                )
                sender.packing[slot] = pack
                self._helper.submit(pack)
                progress = True

    def _ready_senders(self) -> Iterator[_Sender]:
        for sender in list(self._senders.values()):
            room = self._free and sender.num_staged < self._per_peer
            if room and sender.waiting and len(sender.packing) < _AHEAD:
                yield sender

    def _chunk(self, slot: int) -> np.ndarray:
        assert self._staging is not None
        return self._staging[slot * self._stride : (slot + 1) * self._stride]

    def _break(self, boot: str, error: PeerError) -> None:
        log.warning("pair_broken", extra={"fields": {"boot": boot, "error": str(error)}})
        self.disconnect(boot)

    def _end(self, job: PostJob, error: str, *, stale: bool = False, lost: bool = False) -> None:
        self._done.append(PostDone(job.job, job.key, error, stale, lost))
