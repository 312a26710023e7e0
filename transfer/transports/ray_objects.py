"""Ray's object store as a rank process uses it: whole arrays are put, named to a peer, and got. Knows no pages.

A rank process is a child of the Serve replica and no actor, so it joins the running Ray as a driver of its own. An
object is named by what Ray's core puts into a message of its own (binary id, owner, status): pickling a reference
outside a task would pin its object until the process ends. The owner keeps an object for as long as it holds the
reference; whoever got it has a read-only view that stays. If the owner dies, `get` says so within a second; if it is
stopped, what lies on this host can still be got.
"""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.model.errors import ConfigError, PeerError

log = logging.getLogger(__name__)

_ANSWER_S = 5.0


class NotYet(Exception):
    """The object is not here yet: ask again."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What a peer needs to get an object."""

    binary: bytes
    owner: bytes
    status: bytes


class RayObjects:
    """This process's place in the running Ray.

    Args:
        address: of the head; `auto` finds the Ray of this host.

    Raises:
        ConfigError: Ray does not run there.
    """

    def __init__(self, address: str = "auto") -> None:
        main = threading.current_thread() is threading.main_thread()
        handler, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
        try:
            self._ray: Any = importlib.import_module("ray")
            self._joined = not self._ray.is_initialized()
            if self._joined:
                self._join(address)
        finally:  # what Ray does to a driver's signals and exceptions is undone: they are the process's own
            if main:
                signal.signal(signal.SIGTERM, handler)
            sys.excepthook = hook

    def _join(self, address: str) -> None:
        _answers(address)
        try:
            self._ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="tailrace-pages")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"transport ray needs a running Ray, none answers at {address} ({error})") from None
        log.info("ray_joined", extra={"fields": {"address": address, "version": self._ray.__version__}})

    @property
    def _core(self) -> Any:
        return self._ray._private.worker.global_worker.core_worker

    def put(self, data: np.ndarray) -> tuple[Any, ObjectName]:
        """Copy an array into the store; (the reference that keeps it there, its name for a peer).

        Raises:
            PeerError: the store is full.
        """
        try:
            reference = self._ray.put(data)
        except self._ray.exceptions.RayError as error:
            raise PeerError(f"the object store took no {data.nbytes} bytes: {error}") from None
        _, owner, status = self._core.serialize_object_ref(reference)
        return reference, ObjectName(reference.binary(), owner, status)

    def named(self, name: ObjectName) -> Any:
        """The reference to a peer's object. Raises PeerError if it names none."""
        try:
            reference = self._ray.ObjectRef(name.binary)
            nil = self._ray.ObjectRef.nil()
            self._core.deserialize_and_register_object_ref(name.binary, nil, name.owner, name.status)
        except (ValueError, TypeError) as error:
            raise PeerError(f"this names no object: {error}") from None
        return reference

    def get(self, reference: Any, wait_s: float) -> np.ndarray:
        """The object, [n] uint8 read-only.

        Raises:
            NotYet: not within `wait_s`.
            PeerError: it is lost, or no such array.
        """
        try:
            data = self._ray.get(reference, timeout=wait_s)
        except self._ray.exceptions.GetTimeoutError:
            raise NotYet from None
        except self._ray.exceptions.RayError as error:
            raise PeerError(f"the object is lost: {type(error).__name__}") from None
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            raise PeerError("the object is no array of bytes")
        return data

    def close(self) -> None:
        """Leave Ray, if this joined it: every object that was put here goes."""
        if self._joined:
            self._joined = False
            self._ray.shutdown()


def _answers(address: str) -> None:
    """Ray itself would try an address where nobody listens for minutes. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"transport ray needs a running Ray, none answers at {address} ({error})") from None
