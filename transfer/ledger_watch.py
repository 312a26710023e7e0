"""Whether the books of a worker add up: looked at whenever it rests, shown as gauges, recorded so that it can be told.

    at rest    pages and landing chunks recounted; a worker that has nothing in work uses no page
    at once    the books refuse a change, or a page is freed while a copy of ours may write it (recorder.py)

A breach of the first law ends the process, after a dump of the flight recorder: what its pages hold can no longer be
trusted. Pages in use at rest harm nobody but are lost: they are dumped, counted and shown. Belongs to the transfer
thread. Dies with its worker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import LedgerError
from tailrace.transfer.core_events import Action, Wire
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.faults import FaultPlan
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.metrics import Metrics
from tailrace.transfer.node_config import NodeConfig
from tailrace.transfer.node_stats import set_page_gauges
from tailrace.transfer.recorder import Recorder
from tailrace.transfer.transports.base import Transport

STILL_S = 2.0  # so long after the last event a page in use is in nobody's hands


class LedgerWatch:
    """See the module.

    Args:
        transports: whose landing chunks are recounted.
    """

    def __init__(self, config: NodeConfig, kv: KvManager, transports: Sequence[Transport], metrics: Metrics) -> None:
        header = {
            "tailrace": version("tailrace"),
            "worker": config.worker,
            "boot": config.boot,
            "duty": config.duty,
            "config": config.core,
            "books": {"layout": kv.layout, "block_tokens": kv.block_tokens, "granule_tokens": kv.granule_tokens},
        }
        folder = Path(config.recorder_dir or Path(tempfile.gettempdir()) / "tailrace-recordings")
        self.recorder = Recorder(kv, config.recorder_bytes, folder, header)
        self._kv, self._transports, self._metrics = kv, transports, metrics
        self._config = config
        self._show("kv", True)

    def cores(self, wire: Wire, headroom_pages: Callable[[], int]) -> tuple[CtxCore | None, GenCore | None]:
        """The cores that this worker's duty needs; recording begins."""
        config, heard = self._config, self.recorder.heard
        kv = heard(self._kv)
        ctx = CtxCore(kv, config.core) if config.duty != "gen" else None
        gen = GenCore(kv, heard(wire), config.core, heard(headroom_pages)) if config.duty != "ctx" else None
        self.recorder.record(ctx=ctx, gen=gen)
        return ctx, gen

    def handle(self, core: Any, event: Any, now: float) -> list[Action]:
        """What the core makes of an event.

        Raises:
            LedgerError: a breach; it has been dumped.
        """
        try:
            return self.recorder.handle(core, event, now)
        except LedgerError:
            self._show("kv", False)
            raise

    def at_rest(self, now: float, since: float) -> bool:
        """Recount: nothing is in work since then. True if that is done until something happens again.

        Raises:
            LedgerError: pages or landing chunks do not add up; it has been dumped.
        """
        try:
            self._kv.check()
        except LedgerError as error:
            self._broken("kv", str(error))
            raise
        for counts in (transport.counts() for transport in self._transports):
            if counts.free + counts.granted + counts.unpacking != counts.total:
                reason = f"landing chunks do not add up: {counts}"
                self._broken("landing", reason)
                raise LedgerError(reason)
            if counts.total:
                self._show("landing", True)
        used = self._kv.counts().used
        if used and now - since < STILL_S:  # its last owner may be about to let go
            return False
        self._show("kv", not used)
        if used:
            self._broken("kv", f"{used} pages are in use, and nothing is in work")
        else:
            self.recorder.restart()
        return True

    def obey(self, plan: FaultPlan) -> None:
        """Tests: somebody asks for a recording."""
        if plan.record:
            self.recorder.dump("asked", "on the operators' port")

    def measure(self) -> None:
        """Before a report: pages by state, and how many recordings were written."""
        set_page_gauges(self._metrics, self._kv.counts())
        for why, number in self.recorder.dumps.items():
            self._metrics.raise_to("tailrace_recordings_total", number, reason=why)

    def _broken(self, books: str, reason: str) -> None:
        self._show(books, False)
        self.recorder.breach(reason)

    def _show(self, books: str, holds: bool) -> None:
        self._metrics.add("tailrace_ledger_holds", float(holds), books=books)
