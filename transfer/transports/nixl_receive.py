"""Gen's half of the nixl transport: agents that receive, landing chunks, unpacking. See nixl.py."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import astuple, dataclass

import msgpack
import numpy as np

from tailrace.model.errors import PeerError, ProtocolError
from tailrace.transfer import frames
from tailrace.transfer.messages import Landed
from tailrace.transfer.transports.base import LandedIn, PageHook, ReadDone, ReadJob
from tailrace.transfer.transports.conversion import Conversion, PairConversions, Ranks
from tailrace.transfer.transports.copying import Helper
from tailrace.transfer.transports.landing import CODED_PAGE_EXTRA, HEADER_BYTES, LandingBook
from tailrace.transfer.transports.nixl_agents import Agent, memory
from tailrace.transfer.transports.packing import UnpackJob

log = logging.getLogger(__name__)

PROBE = b"probe"
PROBE_BYTES = 4096
PROBE_LIMIT_S = 5.0
_INFO = "landing 1"


def known_bytes(agent: str) -> bytes:
    """What the probe of a pair carries; both sides know the receiving agent's name."""
    return hashlib.shake_256(agent.encode()).digest(PROBE_BYTES)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a receiver's memory is and how it is divided: what its info says.

    Attributes:
        metadata: of its NIXL agent.
        address, stride, num_chunks: chunk i begins at address + i * stride with its header.
        room: bytes of pages a chunk takes.
        probe_address: PROBE_BYTES that the sender writes once.
    """

    agent: str
    metadata: bytes
    address: int
    stride: int
    num_chunks: int
    room: int
    probe_address: int
    page_bytes: int

    def encode(self) -> bytes:
        return bytes(msgpack.packb([_INFO, *astuple(self)]) or b"")

    @staticmethod
    def decode(info: bytes) -> Target | None:
        """None if the peer receives nothing. Raises PeerError if it is malformed."""
        if not info:
            return None
        try:
            name, *rest = msgpack.unpackb(info)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise PeerError(f"the peer's nixl info is malformed: {error}") from None
        kinds = (str, bytes, int, int, int, int, int, int)
        if name != _INFO or [type(v) for v in rest] != list(kinds) or any(type(v) is int and v < 0 for v in rest):
            raise PeerError("the peer's nixl info is malformed or of another version")
        return Target(*rest)


class _Receiver:
    """One peer's way in."""

    def __init__(self, name: str, landing: np.ndarray, now: float) -> None:
        self.probe_area = memory(PROBE_BYTES)
        self.agent = Agent(name, [landing, self.probe_area])
        self.made_at = now
        self.probed = threading.Event()

    def probe_is_right(self) -> bool:
        return self.probe_area.tobytes() == known_bytes(self.agent.name)


class LandingSide:
    """Every pair in which this worker is gen.

    Args:
        boot: our boot id.
        own: our ranks' pages.
        num_chunks, pages_per_chunk: of the landing memory, which is allocated with the first pair.
        helper: unpacks; what it ends with is given to `unpacked`.
    """

    def __init__(
        self, boot: str, own: Ranks, num_chunks: int, pages_per_chunk: int, helper: Helper, hook: PageHook | None
    ) -> None:
        self._page_bytes = sum(pages.shape[1] for pages in own)
        room = max(pages_per_chunk * self._page_bytes, self._page_bytes + CODED_PAGE_EXTRA)
        self.book = LandingBook(num_chunks, room)
        self.stale_notifications = 0
        self.corrupt_chunks = 0
        self._boot, self._own, self._helper, self._hook = boot, own, helper, hook
        self._num_chunks, self._pages_per_chunk = num_chunks, pages_per_chunk
        self._conversions = PairConversions()
        self._stride = HEADER_BYTES + self.book.nbytes
        self._landing: np.ndarray | None = None
        self._receivers: dict[str, _Receiver] = {}
        self._made = 0
        self._jobs: dict[int, UnpackJob] = {}
        self._done: list[ReadDone] = []

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str, now: float) -> bytes:
        """Our Target for this peer, whose agent is made now if there is none; empty if we receive nothing."""
        if not self._num_chunks:
            return b""
        if self._landing is None:
            self._landing = memory(self._num_chunks * self._stride)
        receiver = self._receivers.get(boot)
        if receiver is None:
            self._made += 1
            receiver = _Receiver(f"{self._boot}<{boot}#{self._made}", self._landing, now)
            self._receivers[boot] = receiver
        return Target(
            receiver.agent.name,
            receiver.agent.metadata,
            self._landing.ctypes.data,
            self._stride,
            self._num_chunks,
            self.book.nbytes,
            receiver.probe_area.ctypes.data,
            self._page_bytes,
        ).encode()

    def connect(self, boot: str, conversion: Conversion | None) -> None:
        """How this ctx's pages become ours; None if they are alike. Raises PeerError if a chunk takes none of them."""
        if conversion is not None and conversion.wire_page_bytes > self.book.nbytes and self._num_chunks:
            raise PeerError(
                f"a page of {boot} takes {conversion.wire_page_bytes} bytes, a landing chunk has {self.book.nbytes}"
            )
        self._conversions.put(boot, conversion)

    def units_in_grant(self, boot: str) -> int:
        conversion = self._conversions.get(boot)
        return self._pages_per_chunk if conversion is None else self.book.nbytes // conversion.wire_page_bytes

    def probe(self, boot: str) -> bool:
        """Wait, in a thread that does not poll, for the known bytes that the peer writes when it connects."""
        receiver = self._receivers.get(boot)
        return receiver is not None and receiver.probed.wait(PROBE_LIMIT_S) and receiver.probe_is_right()

    def disconnect(self, boot: str) -> None:
        receiver = self._receivers.pop(boot, None)
        if receiver is None:
            return
        receiver.agent.destroy()
        self.book.disconnect(boot)
        self._conversions.end(boot)

    # --------------------------------------------------------------------------------------------------------- landing

    def read(self, job: ReadJob) -> None:
        landed = job.landed
        if landed is None or self._landing is None or not self.book.begin_unpack(landed):
            self._done.append(ReadDone(job.job, job.key, (), (), "nothing of this grant has landed"))
            return
        start = landed.chunk * self._stride
        chunk = self._landing[start : start + self._stride]
        unpack = UnpackJob(job, landed, chunk, self._own, self._hook, self._conversions.get(job.boot))
        self._jobs[job.job] = unpack
        self._helper.submit(unpack)

    def abandon(self, job: int) -> None:
        unpack = self._jobs.get(job)
        if unpack is not None:
            unpack.abandoned = True

    def unpacked(self, done: ReadDone) -> ReadDone:
        """The helper has ended a job: its chunk is free."""
        unpack = self._jobs.pop(done.job)
        self.book.end_unpack(unpack.landed)
        if done.error == "corrupt":
            self.corrupt_chunks += 1
            log.warning("corrupt_chunk", extra={"fields": {"boot": unpack.job.boot, "chunk": unpack.landed.chunk}})
        return done

    def poll(self) -> list[ReadDone | LandedIn]:
        events: list[ReadDone | LandedIn] = list(self._done)
        self._done.clear()
        for boot, receiver in list(self._receivers.items()):
            try:
                messages = receiver.agent.notifications()
            except PeerError as error:
                log.warning("pair_broken", extra={"fields": {"boot": boot, "error": str(error)}})
                self.disconnect(boot)
                continue
            for message in messages:
                if message == PROBE:
                    receiver.probed.set()
                    continue
                landed = self._announced(boot, message)
                if landed is not None:
                    events.append(LandedIn(boot, landed))
        return events

    def busy(self, now: float) -> bool:
        if self._jobs or self._done:
            return True
        return any(
            self.book.has_out(boot) or (not r.probed.is_set() and now - r.made_at < PROBE_LIMIT_S)
            for boot, r in self._receivers.items()
        )

    def close(self) -> None:
        for boot in list(self._receivers):
            self.disconnect(boot)

    def _announced(self, boot: str, message: bytes) -> Landed | None:
        try:
            landed = frames.unpack(message)
        except ProtocolError as error:
            log.warning("bad_notification", extra={"fields": {"boot": boot, "error": str(error)}})
            landed = None
        if not isinstance(landed, Landed) or not self.book.announce(boot, landed):
            self.stale_notifications += 1
            return None
        return landed
