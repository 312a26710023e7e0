"""Which worker has the last turn of which conversation: bounded, least recently used first, and with an end of life.

A binding is a hint. Whether the next turn goes there is policies.py's choice; a binding to a worker that is dead, or
not among the candidates, says nothing, and the next choice replaces it. It lives in the router, so it does not matter
through which ingress a turn comes. If the router dies the bindings die with it, and the prefix index leads to the same
worker. Clock injected.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

TIME_TO_LIVE_S = 3600.0
MOST_CONVERSATIONS = 65536


class Conversations:
    """(tenant, conversation) -> boot id.

    Args:
        most: bindings kept at once.
        time_to_live_s: without a turn.
    """

    def __init__(self, most: int = MOST_CONVERSATIONS, time_to_live_s: float = TIME_TO_LIVE_S) -> None:
        self._most, self._time_to_live_s = most, time_to_live_s
        self._bound: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # by age of the last turn

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, tenant: str, conversation: str, boot: str, now: float) -> None:
        """A turn goes there."""
        key = _key(tenant, conversation)
        self._bound[key] = (boot, now)
        self._bound.move_to_end(key)
        if len(self._bound) > self._most:
            self._bound.popitem(last=False)
        self.expire(now)

    def worker(self, tenant: str, conversation: str, now: float) -> str:
        """Where the last turn went; empty if that is not known (any more)."""
        boot, at = self._bound.get(_key(tenant, conversation), ("", now))
        return boot if now - at <= self._time_to_live_s else ""

    def expire(self, now: float) -> None:
        while self._bound and now - next(iter(self._bound.values()))[1] > self._time_to_live_s:
            self._bound.popitem(last=False)


def _key(tenant: str, conversation: str) -> bytes:
    """16 bytes whatever the client has sent; tenants do not share their conversations."""
    name = f"{len(tenant)} {tenant}{conversation}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=16).digest()
