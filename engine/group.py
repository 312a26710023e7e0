"""How rank 0 tells the other ranks of its worker what to compute: one message a pass over an inherited socket.

    rank 0    Make(arena)                the follower maps its pages and loads its share of the weights
    follower  Vote(why)                  "" if it is ready; rank 0 acts when it has heard all of them
    rank 0    Join                       all ranks meet (model/ranks.py); from now on every pass is run by all
    rank 0    Pass(rows), Pass(rows) ..  run this forward; there is no answer but each rank's part of its sums
    rank 0    Serve                      the warm-up is over
    rank 0    Stop                       the orderly end

Rank 0 may use the pages of a pass when its own forward has returned: the last sum of a forward needs every rank's part,
and a rank has written its last keys and values, and read all pages it reads, before it gives that part.

A message is a 4-byte length and one msgpack array of numbers and bytes; nothing is unpickled. If rank 0 dies, followers
find their socket closed and end; if a follower dies, rank 0's next sum fails. Neither goes on without the other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, cast

import msgpack
import numpy as np
import torch

from tailrace.engine.forward import Forward
from tailrace.engine.step import Row
from tailrace.model.errors import WorkerError

MAX_MESSAGE_BYTES = 2**28
IDLE_WAIT_S = 0.2  # a waiting follower shows this often that it lives
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Make:
    """Map this arena, load this rank's weights."""

    arena: str


@dataclass(frozen=True, slots=True)
class Vote:
    """A follower's answer to Make: why it cannot serve, or empty."""

    why: str


@dataclass(frozen=True, slots=True)
class Join:
    """Everybody is ready: meet."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward: rows in the order of the batch.

    Attributes:
        num_layers: only the first ones; all if None.
        starts: [rows] int64, absolute position of each row's first new token.
        num_new, num_pages: [rows] int32, how many of `ids` and of `pages` are each row's, one behind the other.
        ids, pages: int32.
    """

    num_layers: int | None
    starts: bytes
    num_new: bytes
    num_pages: bytes
    ids: bytes
    pages: bytes

    @classmethod
    def of(cls, rows: Sequence[Row], num_layers: int | None) -> Pass:
        return cls(
            num_layers,
            np.array([row.start for row in rows], np.int64).tobytes(),
            np.array([len(row.ids) for row in rows], np.int32).tobytes(),
            np.array([len(row.pages) for row in rows], np.int32).tobytes(),
            np.concatenate([row.ids for row in rows], dtype=np.int32).tobytes(),
            np.concatenate([row.pages for row in rows], dtype=np.int32).tobytes(),
        )

    def rows(self) -> list[Row]:
        """The rows, without keys and samplers."""
        ids = np.split(np.frombuffer(self.ids, np.int32), np.cumsum(np.frombuffer(self.num_new, np.int32)))
        pages = np.split(np.frombuffer(self.pages, np.int32), np.cumsum(np.frombuffer(self.num_pages, np.int32)))
        starts = np.frombuffer(self.starts, np.int64).tolist()
        return [Row(None, ids[i], start, pages[i]) for i, start in enumerate(starts)]


@dataclass(frozen=True, slots=True)
class Serve:
    """The warm-up is over."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End in order."""


Message = Make | Vote | Join | Pass | Serve | Stop
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Make, Vote, Join, Pass, Serve, Stop)}


class Channel:
    """One end of a socket between rank 0 and a follower. One thread at a time."""

    def __init__(self, end: socket.socket, other: str) -> None:
        """`other`: what to call the other end in messages, e.g. `rank 2`."""
        self._end, self._other = end, other
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Raises WorkerError if the other end is gone. Blocks while it reads nothing."""
        data = cast(bytes, msgpack.packb([type(message).__name__, *astuple(message)]))
        try:
            self._end.settimeout(None)
            self._end.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise WorkerError(f"{self._other} is gone: {error.strerror}") from error

    def receive(self, limit_s: float | None = None) -> Message | None:
        """The next message; None if none came within `limit_s`.

        Raises:
            WorkerError: the other end is gone, or said what is no message.
        """
        size = self._next_size()
        while size is None or len(self._received) < _LENGTH.size + size:
            self._end.settimeout(limit_s)
            try:
                data = self._end.recv(1 << 20)
            except TimeoutError:
                return None
            except OSError as error:
                raise WorkerError(f"{self._other} is gone: {error.strerror}") from error
            if not data:
                raise WorkerError(f"{self._other} is gone")
            self._received += data
            size = self._next_size()
        data = bytes(self._received[_LENGTH.size : _LENGTH.size + size])
        del self._received[: _LENGTH.size + size]
        return self._message(data)

    def close(self) -> None:
        self._end.close()

    def _next_size(self) -> int | None:
        if len(self._received) < _LENGTH.size:
            return None
        size = _LENGTH.unpack_from(self._received)[0]
        if size > MAX_MESSAGE_BYTES:
            raise WorkerError(f"{self._other} announces {size} bytes; a message has {MAX_MESSAGE_BYTES} at most")
        return size

    def _message(self, data: bytes) -> Message:
        try:
            fields: list[Any] = msgpack.unpackb(data)
            return _KINDS[fields[0]](*fields[1:])
        except (ValueError, TypeError, LookupError) as error:
            raise WorkerError(f"{self._other} said what is no message: {error!r}") from error


class Followers:
    """Rank 0's side: the other ranks of its worker, in order.

    Args:
        channels: one a follower.
        pools: of each follower, [num_pages, layer, field, kv_head, token, dim], mapped here: in host memory rank 0
            copies and poisons the pages of all ranks, between passes.
    """

    def __init__(self, channels: Sequence[Channel], pools: Sequence[torch.Tensor]) -> None:
        self.channels, self.pools = tuple(channels), tuple(pools)

    def tell(self, message: Message) -> None:
        """Send it to all. Raises WorkerError if one is gone."""
        for channel in self.channels:
            channel.send(message)

    def run(self, rows: Sequence[Row], num_layers: int | None) -> None:
        """Have them run this forward; the caller runs its own part next."""
        self.tell(Pass.of(rows, num_layers))


@torch.inference_mode()
def follow(channel: Channel, forward: Forward, progress: Callable[[bool], None]) -> None:
    """A follower's loop: run what rank 0 says until it says Stop.

    Args:
        progress: told at least every IDLE_WAIT_S and after each pass; with True once the warm-up is over.

    Raises:
        WorkerError: rank 0 or another rank is gone.
    """
    serving = False
    while True:
        match channel.receive(IDLE_WAIT_S):
            case Pass() as message:
                forward(message.rows(), message.num_layers)
            case Serve():
                serving = True
            case Stop():
                return
            case None:
                pass
            case message:
                raise WorkerError(f"rank 0 says {type(message).__name__} to a rank that is running")
        progress(serving)
