"""Back-flow beside a ctx's switchboard: which gens can be read, and by what. Decisions are in backflow.py.

A gen that pairs names its memory in its Hello for every transport that reads; ctx maps it too, if pages would keep
every bit on the way back. Others are `unsupported`, said once a pair and counted with each offer. Belongs to the
transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import PeerError
from tailrace.transfer.backflow import Backflow, result
from tailrace.transfer.core_events import Action
from tailrace.transfer.messages import CompatRecord, Hello, Offer
from tailrace.transfer.pairing import conversion_between, exact_between
from tailrace.transfer.transports.base import ReadDone, Transport

log = logging.getLogger(__name__)


class BackflowPort:
    """See the module.

    Args:
        transports: of this worker; only those that read are used.
        clock: monotonic seconds.
    """

    def __init__(
        self, kv: KvManager, transports: Sequence[Transport], compat: CompatRecord, clock: Callable[[], float]
    ) -> None:
        self._core = Backflow(kv)
        self._transports = [transport for transport in transports if not transport.units_per_grant]
        self._compat, self._clock = compat, clock
        self._gens: dict[str, tuple[Transport, int]] = {}  # boot -> what reads it, and its tokens a page

    @property
    def idle(self) -> bool:
        return self._core.idle

    def hello(self, hello: Hello) -> None:
        """A gen has been paired: map its memory, if it can be read from here."""
        why = "no transport that both have reads its memory"
        if not exact_between(hello.compat, self._compat, landing=False):
            why = f"its pages are {hello.compat.dtype}, ours {self._compat.dtype}"
        else:
            for transport in self._transports:
                if transport.name not in hello.transports:
                    continue
                try:
                    conversion = conversion_between(hello.compat, self._compat, landing=False)
                    transport.connect(hello.boot, hello.transports[transport.name], conversion)
                except PeerError as error:
                    why = str(error)
                    continue
                self._gens[hello.boot] = (transport, hello.compat.tokens_per_page)
                return
        log.warning("backflow_unsupported", extra={"fields": {"worker": hello.worker, "reason": why}})

    def offered(self, boot: str, offer: Offer) -> list[Action]:
        if boot not in self._gens:
            return [result("unsupported")]
        return self._core.offered(boot, self._gens[boot][1], offer, self._clock())

    def done(self, done: ReadDone) -> list[Action]:
        return self._core.done(done)

    def advance(self, busy: bool) -> list[Action]:
        return self._core.advance(self._clock(), busy)

    def transport(self, boot: str) -> Transport | None:
        """What reads this gen."""
        entry = self._gens.get(boot)
        return None if entry is None else entry[0]

    def gone(self, boot: str) -> None:
        """A gen is dead; the switchboard disconnects it."""
        self._gens.pop(boot, None)
        self._core.gone(boot)
