"""Which transport reaches which peer: where a post to a gen goes, whose chunk has landed, what halves tell each other.

A worker may have several transports, and each of its pairs uses one. Knows no protocol. Plain dictionaries that the
switchboard asks; they die with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tailrace.model.errors import PeerError
from tailrace.transfer.messages import Landed, Notice
from tailrace.transfer.transports.base import HearsNotices, PostJob, Transport

log = logging.getLogger(__name__)


class Ways:
    """See the module.

    Args:
        transports: all of this worker.
        stale: called for a notice that nobody here understands.
        news: called when `poll` of a transport has something new.
    """

    def __init__(self, transports: Sequence[Transport], stale: Callable[[], None], news: Callable[[], None]) -> None:
        self._stale, self._news = stale, news
        self._transports = {transport.name: transport for transport in transports}
        self._posts: dict[str, Transport] = {}  # boot of a gen -> how pages are written to it
        self._lands: dict[str, Transport] = {}  # boot of a ctx -> how its pages land here, also after the pair's end

    def gen_chose(self, boot: str, names: Sequence[str]) -> None:
        """A gen was told that it can be reached so; it tries one at a time, and the last is the one that it uses."""
        for name in names:
            if self._transports[name].units_per_grant:
                self._posts[boot] = self._transports[name]

    def lands(self, boot: str, transport: Transport) -> None:
        """Pages of this ctx come to us so, from now on."""
        self._lands[boot] = transport

    def dead(self, boots: Sequence[str]) -> None:
        for boot in boots:
            self._posts.pop(boot, None)
            self._lands.pop(boot, None)

    def post(self, job: PostJob) -> None:
        """Over the transport that its gen chose; over any that can say that there is no pair, if it is gone."""
        self._posts.get(job.boot, self._any_landing()).post(job)

    def drop_landed(self, boot: str, landed: Landed) -> None:
        self._lands.get(boot, self._any_landing()).drop_landed(boot, landed)

    def noticed(self, boot: str, notice: Notice) -> None:
        """Hand it to our half; what that does not understand, or has no half here, is stale."""
        transport = self._transports.get(notice.transport)
        if not isinstance(transport, HearsNotices):
            self._stale()
            return
        try:
            transport.noticed(boot, notice.data)
            self._news()
        except PeerError as error:
            log.warning("bad_notice", extra={"fields": {"boot": boot, "reason": str(error)}})
            self._stale()

    def _any_landing(self) -> Transport:
        return next(t for t in self._transports.values() if t.units_per_grant)
