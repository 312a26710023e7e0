"""One NIXL agent a pair and side, and nothing of pages: what may be written where is decided above (nixl.py).

A pair has its own agent at the side that receives, so that destroying it ends everything that this peer ever posted
and nothing else; and its own at the side that sends, so that destroying it gives back the memory that it read. Agents
have no progress thread: whoever owns one polls it, from one thread.

UCX's `cma` transport is excluded. With it the sender's kernel writes into the receiver's memory on its own, so a
stopped sender that goes on would write into chunks that belong to others by then; destroying an agent at the receiver
ends nothing. Over tcp the receiver itself places what comes, over RDMA its adapter refuses what is not registered.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.model.errors import ConfigError, PeerError, WorkerError

ENGINE_CONFIG = "TLS=^cma"
_CMA_ALIASES = frozenset({"all", "cma", "shm", "sm"})


class NotPosted(PeerError):
    """A write was refused before anything of it was sent."""


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if the operator's UCX settings allow a transport that writes past the receiver."""
    value = environment.get("UCX_TLS")
    if value is None:
        return
    names = {name.strip() for name in value.removeprefix("^").split(",")}
    mentions_cma = bool(names & _CMA_ALIASES)
    if mentions_cma != value.startswith("^"):
        raise ConfigError(f"UCX_TLS={value} allows cma, with which a stopped peer can write into re-used memory")


def memory(nbytes: int) -> np.ndarray:
    """[nbytes] uint8, page-aligned and zero."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class Write:
    """A posted write; empty once its agent is destroyed."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle: Any = None


class Agent:
    """A NIXL agent with registered memory, for one pair.

    Args:
        name: unique in the cluster and in time.
        regions: memory it may read from, or that its peer may write to; kept alive by it.

    Every method raises PeerError if NIXL does; the pair must then be given up.
    """

    def __init__(self, name: str, regions: list[np.ndarray]) -> None:
        self.name = name
        self._regions = regions
        self._writes: set[Write] = set()
        self._errors, make, config = _load()
        failed = ""
        try:
            self._agent: Any = make(name, config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("UCX", {"engine_config": ENGINE_CONFIG})
            self._agent.register_memory([(r.ctypes.data, r.nbytes, 0, "") for r in regions], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            failed = f"NIXL agent {name} cannot be made: {error}"
        if failed:
            raise PeerError(failed)

    def load(self, metadata: bytes) -> str:
        """Get to know a peer's agent; returns its name."""
        return self._call(
            "the peer's NIXL metadata cannot be used", lambda: self._agent.add_remote_agent(metadata)
        ).decode()

    def write(self, sources: Sequence[np.ndarray], remote: str, address: int, notification: bytes) -> Write:
        """Post a write of `sources`, one after the other, to `address` at the remote agent.

        It gets the notification after the bytes; none if that is empty. May block while bytes are copied into a socket.
        Raises NotPosted if nothing of it was or will be sent.
        """
        sizes = [source.nbytes for source in sources]
        starts = itertools.accumulate(sizes, initial=address)
        pieces = [(source.ctypes.data, size, 0) for source, size in zip(sources, sizes, strict=True)]
        local = self._agent.get_xfer_descs(pieces, "DRAM")
        there = self._agent.get_xfer_descs([(at, size, 0) for at, size in zip(starts, sizes, strict=False)], "DRAM")
        write = Write()
        failed = ""
        try:
            write.handle = self._agent.initialize_xfer("WRITE", local, there, remote, notification)
        except self._errors as error:
            failed = f"a write cannot be made: {error}"
        if failed:
            raise NotPosted(failed)
        self._writes.add(write)
        if self._call("a write failed", lambda: self._agent.transfer(write.handle)) == "ERR":
            raise PeerError("a write failed")
        return write

    def is_done(self, write: Write) -> bool:
        """Whether the write has arrived as a whole and its source is free."""
        state = self._call("a write failed", lambda: self._agent.check_xfer_state(write.handle))
        if state == "ERR":
            raise PeerError("a write failed")
        return state == "DONE"

    def notify(self, remote: str, message: bytes) -> None:
        """Send a notification by itself; polling moves it on."""
        self._call("a notification failed", lambda: self._agent.send_notif(remote, message))

    def release(self, write: Write) -> None:
        """Forget a write that is done."""
        self._call("a finished write cannot be released", lambda: self._agent.release_xfer_handle(write.handle))
        self._writes.discard(write)
        write.handle = None

    def notifications(self) -> list[bytes]:
        """What arrived since the last call; calling it is also what makes arriving bytes move on."""
        found = self._call("notifications cannot be read", lambda: self._agent.get_new_notifs())
        return [message for messages in found.values() for message in messages]

    def destroy(self) -> None:
        """End everything under way at this agent; about 0.1 s. Then nothing reads or writes the regions through it."""
        for write in self._writes:
            write.handle = None  # each keeps the agent alive
        self._writes.clear()
        inner = weakref.ref(self._agent.agent)
        self._agent = None
        if inner() is not None:
            raise WorkerError(f"NIXL agent {self.name} is still in use and cannot be destroyed")

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        """Raises PeerError in place of NIXL's errors, whose tracebacks would keep handles, and so the agent, alive."""
        try:
            return call()
        except self._errors as error:
            failed = f"{what}: {error}"
        raise PeerError(failed)


def check_installed() -> None:
    """Raises ConfigError unless agents can be made here. Loads NIXL, which takes half a second."""
    _load()


def _load() -> tuple[tuple[type[Exception], ...], Any, Any]:
    """NIXL's exception types (it has no common base), agent class and config class."""
    check_environment(os.environ)
    raise_exceptions = logging.raiseExceptions
    try:
        api = importlib.import_module("nixl._api")
        bindings = importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(f"transport nixl needs the package nixl==1.5.1 ({error})") from None
    finally:
        logging.raiseExceptions = raise_exceptions  # which NIXL switches off for everybody
    logging.getLogger("nixl").setLevel(logging.WARNING)
    kinds = tuple(k for k in vars(bindings).values() if isinstance(k, type) and issubclass(k, Exception))
    return kinds, api.nixl_agent, api.nixl_agent_config
