"""Gen's half of the ucx transport: stations that receive, what has arrived, unpacking. See ucx.py.

A message: [header 4096 bytes | pages | what they are: a Landed frame | envelope]. The envelope holds the pair's token
and the length of the frame; the first message of a connection has no frame, only the known bytes of the probe.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import struct
import threading
from dataclasses import astuple, dataclass

import msgpack
import numpy as np

from tailrace.model.errors import PeerError, ProtocolError
from tailrace.transfer import frames
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Landed, LandingGrant
from tailrace.transfer.transports.base import LandedIn, PageHook, ReadDone, ReadJob
from tailrace.transfer.transports.conversion import Conversion, PairConversions, Ranks
from tailrace.transfer.transports.copying import Helper
from tailrace.transfer.transports.landing import CODED_PAGE_EXTRA, HEADER_BYTES, LandingBook
from tailrace.transfer.transports.packing import UnpackJob
from tailrace.transfer.transports.ucx_thread import Arrived, Ended, UcxThread, new_tag

log = logging.getLogger(__name__)

ENVELOPE = struct.Struct("<16sQ")  # token of the pair, bytes of the frame before it
PROBE_BYTES = 4096
FRAME_LIMIT = 1 << 20  # of a frame and its envelope; one of sixteen thousand pages in any order takes less
PROBE_LIMIT_S = 5.0
_INFO = "active messages 1"


def known_bytes(token: bytes) -> bytes:
    """What the probe of a pair carries; both sides know its token."""
    return hashlib.shake_256(token).digest(PROBE_BYTES)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a receiver listens and what it takes: what its info says.

    Attributes:
        token: of this pair, 16 bytes; every message ends with it.  tag: under which they are sent.
        num_chunks, room: it grants so many messages at once, each with so many bytes of pages at most.
        page_bytes: of one of its pages, all ranks together.
    """

    host: str
    port: int
    token: bytes
    tag: int
    num_chunks: int
    room: int
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
            raise PeerError(f"the peer's ucx info is malformed: {error}") from None
        kinds = [str, int, bytes, int, int, int, int]
        if name != _INFO or [type(v) for v in rest] != kinds or any(type(v) is int and v < 0 for v in rest):
            raise PeerError("the peer's ucx info is malformed or of another version")
        return Target(*rest)


class _Pair:
    """One peer's way in. `lane`: the connection that brought the probe, the latest if there were several."""

    def __init__(self, station: int, target: Target, now: float) -> None:
        self.station, self.target, self.made_at = station, target, now
        self.lane: int | None = None
        self.probed = threading.Event()
        self.probe_is_right = False


class LandingSide:
    """Every pair in which this worker is gen.

    A landing chunk is here the right to send one message: its memory is made by UCX when the message comes, and is
    dropped when it was unpacked or is not wanted.

    Args:
        thread: receives.
        host: that peers dial.
        own: our ranks' pages.
        num_chunks, pages_per_chunk: messages out at once, and pages of ours that one takes.
        helper: unpacks; what it ends with is given to `unpacked`.
    """

    def __init__(
        self,
        thread: UcxThread,
        host: str,
        own: Ranks,
        num_chunks: int,
        pages_per_chunk: int,
        helper: Helper,
        hook: PageHook | None,
    ) -> None:
        self._page_bytes = sum(pages.shape[1] for pages in own)
        room = max(pages_per_chunk * self._page_bytes, self._page_bytes + CODED_PAGE_EXTRA)
        self.book = LandingBook(num_chunks, room)
        self.stale_messages = 0
        self.corrupt_chunks = 0
        self._thread, self._host, self._own, self._helper, self._hook = thread, host, own, helper, hook
        self._num_chunks, self._pages_per_chunk = num_chunks, pages_per_chunk
        self._conversions = PairConversions()
        self._pairs: dict[str, _Pair] = {}
        self._boots: dict[int, str] = {}  # by station
        self._arrived: dict[int, tuple[str, Landed, np.ndarray]] = {}  # by sequence number: nobody unpacks it yet
        self._jobs: dict[int, UnpackJob] = {}
        self._done: list[ReadDone] = []

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str, now: float) -> bytes:
        """Our Target for this peer, whose station is made now if there is none; empty if we receive nothing."""
        if not self._num_chunks:
            return b""
        pair = self._pairs.get(boot)
        if pair is None:
            token, tag = secrets.token_bytes(16), new_tag()
            station, port = self._thread.listen(tag, HEADER_BYTES + self.book.nbytes + FRAME_LIMIT)
            target = Target(self._host, port, token, tag, self._num_chunks, self.book.nbytes, self._page_bytes)
            pair = self._pairs[boot] = _Pair(station, target, now)
            self._boots[station] = boot
        return pair.target.encode()

    def connect(self, boot: str, conversion: Conversion | None) -> None:
        """How this ctx's pages become ours; None if they are alike. Raises PeerError if a message takes none."""
        if conversion is not None and conversion.wire_page_bytes > self.book.nbytes and self._num_chunks:
            raise PeerError(
                f"a page of {boot} takes {conversion.wire_page_bytes} bytes, a message has {self.book.nbytes}"
            )
        self._conversions.put(boot, conversion)

    def units_in_grant(self, boot: str) -> int:
        conversion = self._conversions.get(boot)
        return self._pages_per_chunk if conversion is None else self.book.nbytes // conversion.wire_page_bytes

    def probe(self, boot: str) -> bool:
        """Wait, in a thread that does not poll, for the known bytes that the peer sends when it connects."""
        pair = self._pairs.get(boot)
        return pair is not None and pair.probed.wait(PROBE_LIMIT_S) and pair.probe_is_right

    def disconnect(self, boot: str) -> None:
        """Whatever still comes from this peer is dropped from now on, so what was granted to it is free."""
        pair = self._pairs.pop(boot, None)
        if pair is None:
            return
        del self._boots[pair.station]
        self._thread.close_station(pair.station)
        self.book.disconnect(boot)
        self._conversions.end(boot)

    # --------------------------------------------------------------------------------------------------------- landing

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        return self.book.grant(key, boot, n, self.units_in_grant(boot)) if boot in self._pairs else ()

    def arrived(self, event: Arrived) -> LandedIn | None:
        """A message; None if it is the probe, or nobody waits for it (then it is counted and dropped)."""
        boot = self._boots.get(event.station)
        if boot is None:
            return None  # its pair is over
        pair = self._pairs[boot]
        token, frame_bytes = _envelope(event.data)
        if not hmac.compare_digest(token, pair.target.token):
            self.stale_messages += 1
            return None
        body = event.data[: -ENVELOPE.size]
        if frame_bytes == 0:
            pair.lane, pair.probe_is_right = event.lane, body.tobytes() == known_bytes(token)
            pair.probed.set()
            return None
        landed = self._announced(boot, body, frame_bytes) if event.lane == pair.lane else None
        if landed is None:
            self.stale_messages += 1
            return None
        self._arrived[landed.sequence] = (boot, landed, body[:-frame_bytes])
        return LandedIn(boot, landed)

    def ended(self, event: Ended) -> None:
        """The peer is gone, or its connection failed: the pair is made anew if it comes back."""
        boot = self._boots.get(event.station)
        if boot is not None:
            log.warning("pair_broken", extra={"fields": {"boot": boot, "error": event.error}})
            self.disconnect(boot)

    def read(self, job: ReadJob) -> None:
        landed = job.landed
        if landed is None or not self.book.begin_unpack(landed):
            self._done.append(ReadDone(job.job, job.key, (), (), "nothing of this grant has landed"))
            return
        _, _, chunk = self._arrived.pop(landed.sequence)
        unpack = UnpackJob(job, landed, chunk, self._own, self._hook, self._conversions.get(job.boot))
        self._jobs[job.job] = unpack
        self._helper.submit(unpack)

    def abandon(self, job: int) -> None:
        unpack = self._jobs.get(job)
        if unpack is not None:
            unpack.abandoned = True

    def drop(self, landed: Landed) -> None:
        self.book.drop(landed)
        self._arrived.pop(landed.sequence, None)

    def reclaim(self, key: Key, boot: str) -> None:
        self.book.reclaim(key, boot)
        for sequence, (sender, landed, _) in list(self._arrived.items()):
            if sender == boot and (landed.request, landed.attempt) == key:
                del self._arrived[sequence]

    def unpacked(self, done: ReadDone) -> ReadDone:
        """The helper has ended a job: its chunk is free."""
        unpack = self._jobs.pop(done.job)
        self.book.end_unpack(unpack.landed)
        if done.error == "corrupt":
            self.corrupt_chunks += 1
            log.warning("corrupt_chunk", extra={"fields": {"boot": unpack.job.boot, "chunk": unpack.landed.chunk}})
        return done

    def poll(self) -> list[ReadDone]:
        """Reads that ended before they began."""
        done, self._done = self._done, []
        return done

    def busy(self, now: float) -> bool:
        if self._jobs or self._done:
            return True
        return any(
            self.book.has_out(boot) or (not pair.probed.is_set() and now - pair.made_at < PROBE_LIMIT_S)
            for boot, pair in self._pairs.items()
        )

    def close(self) -> None:
        for boot in list(self._pairs):
            self.disconnect(boot)

    def _announced(self, boot: str, body: np.ndarray, frame_bytes: int) -> Landed | None:
        if frame_bytes + HEADER_BYTES > len(body):
            return None
        try:
            landed = frames.unpack(body[-frame_bytes:].tobytes())
        except ProtocolError as error:
            log.warning("bad_message", extra={"fields": {"boot": boot, "error": str(error)}})
            return None
        if not isinstance(landed, Landed) or len(body) - frame_bytes != HEADER_BYTES + landed.nbytes:
            return None
        return landed if self.book.announce(boot, landed) else None


def _envelope(data: np.ndarray) -> tuple[bytes, int]:
    """(token, bytes of the frame) of a message; ("", 0) if it has none."""
    if len(data) < ENVELOPE.size:
        return b"", 0
    token, frame_bytes = ENVELOPE.unpack(data[-ENVELOPE.size :].tobytes())
    return token, frame_bytes
