"""Pairing: a gen and a ctx find out, before use and off the hot path, whether and how pages can move between them.

    gen dials ctx    Hello(compat, {transport: info}) ->
                     <- Hello(compat, {transport: info}), or Refuse(field, mine, theirs) and the link is closed
    gen connects the transport and probes it; if it does not work the next one is tried with another Hello

Both sides compare the records. Tokens a page, tensor parallelism and, through a codec that both have, the storage dtype
may differ: then pages are converted (transports/conversion.py). Any other difference refuses the pair and both workers
go on. A refused peer is asked again seldom, because only a restart can change its answer; one that does not answer is
dialled again with back-off. Belongs to the transfer thread's event loop. Knows no request. A link's end is reported,
and is no death.

What peers and transports are known to raise (PeerError, OSError) costs a pair some time. A fault that nobody foresaw
ends the process, as any other on the transfer thread does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tailrace.kv_cache.layout import DTYPE_BYTES
from tailrace.model.errors import PairRefused, PeerError
from tailrace.transfer.codec_choice import RAW, Choice, lossy_steps
from tailrace.transfer.compat import ROWS
from tailrace.transfer.links import Identity, Link, dial
from tailrace.transfer.messages import CompatRecord, GroupRecord, Hello, PeerAddress, Refuse
from tailrace.transfer.page_plan import PoolGeometry
from tailrace.transfer.transports.base import Transport
from tailrace.transfer.transports.conversion import Conversion

log = logging.getLogger(__name__)

REFUSED_RETRY_S = 5.0
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
HELLO_S = 5.0


_ALIKE = ("protocol", "model", "block_tokens")
_ALIKE_WHOLE = ("tokens_per_page", "tp", "dtype", "page_bytes")  # of pages that nothing but their model can take apart


def mismatch(mine: CompatRecord, theirs: CompatRecord) -> PairRefused | None:
    """The first field in which two workers differ and may not, with both values; None if they can be paired."""
    for field in _ALIKE:
        ours, other = getattr(mine, field), getattr(theirs, field)
        if ours != other:
            return PairRefused(field, ours, other)
    if len(mine.groups) != len(theirs.groups):
        return PairRefused("groups", len(mine.groups), len(theirs.groups))
    for i, (ours, other) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        differing = _groups_differ(f"groups[{i}]", ours, other)
        if differing is not None:
            return differing
    if takes_whole_pages(mine):
        return _whole_pages_differ(mine, theirs)
    for field in ("tokens_per_page", "tp", "dtype"):
        if not (_possible(field, mine) and _possible(field, theirs)):
            return PairRefused(field, getattr(mine, field), getattr(theirs, field))
    if codec_between(mine, theirs) is None:
        field = "codecs" if mine.dtype == theirs.dtype else "dtype"
        return PairRefused(field, getattr(mine, field), getattr(theirs, field))
    return None


def takes_whole_pages(record: CompatRecord) -> bool:
    """Whether a worker's pages cannot be taken apart or converted."""
    return any(group.kind == ROWS for group in record.groups)


def _whole_pages_differ(mine: CompatRecord, theirs: CompatRecord) -> PairRefused | None:
    for field in _ALIKE_WHOLE:
        ours, other = getattr(mine, field), getattr(theirs, field)
        if ours != other:
            return PairRefused(field, ours, other)
    if codec_between(mine, theirs) != RAW:
        return PairRefused("codecs", mine.codecs, theirs.codecs)
    return None


def _possible(field: str, record: CompatRecord) -> bool:
    """Whether a field that may differ has a value that pages can have."""
    if field == "tokens_per_page":
        tokens, block = record.tokens_per_page, record.block_tokens
        return tokens >= 1 and (tokens % block == 0 or block % tokens == 0)
    if field == "dtype":
        return record.dtype in DTYPE_BYTES
    return all(record.tp >= 1 and max(g.kv_heads, record.tp) % min(g.kv_heads, record.tp) == 0 for g in record.groups)


def _groups_differ(name: str, ours: GroupRecord, other: GroupRecord) -> PairRefused | None:
    for field in ("kind", "window"):
        if getattr(ours, field) != getattr(other, field):
            return PairRefused(f"{name}.{field}", getattr(ours, field), getattr(other, field))
    mine, theirs = dict(ours.layers), dict(other.layers)
    layers = [n for n in sorted(mine | theirs) if mine.get(n) != theirs.get(n)]
    if layers:
        which = ", ".join(str(n) for n in layers)
        return PairRefused(f"{name} layers {which}", *("; ".join(_rows(have, layers)) for have in (mine, theirs)))
    for field in ("fields", "kv_heads", "dim"):
        if getattr(ours, field) != getattr(other, field):
            return PairRefused(f"{name}.{field}", getattr(ours, field), getattr(other, field))
    return None


def _rows(have: dict[int, str], layers: Sequence[int]) -> list[str]:
    """What one side has of the layers that differ; each description once."""
    return list(dict.fromkeys(have.get(n, "none") for n in layers))


def geometry(record: CompatRecord, group: GroupRecord) -> PoolGeometry:
    """Of a worker's pages of a group; pages that are taken whole are one row."""
    if group.kind == ROWS:
        return PoolGeometry(1, 1, 1, 1, group.dim, "uint8", record.tp)
    return PoolGeometry(
        record.tokens_per_page, len(group.layers), group.fields, group.kv_heads, group.dim, record.dtype, record.tp
    )


def codec_between(source: CompatRecord, destination: CompatRecord) -> str | None:
    """The first of ctx's codecs that gen has too and that bridges their dtypes, which `raw` does not."""
    bridging = [c for c in source.codecs if c in destination.codecs and (source.dtype == destination.dtype or c != RAW)]
    return bridging[0] if bridging else None


def codec_used(source: CompatRecord, destination: CompatRecord, *, landing: bool) -> Choice:
    """What the pages of a pair that is not refused go through, and why.

    `landing`: they go over a wire. Where gen reads ctx's memory a codec saves nothing, so it only bridges dtypes.
    """
    if source.dtype == destination.dtype and not landing:
        return Choice(RAW, "gen reads the context worker's memory: there is no wire")
    codec = codec_between(source, destination) or RAW
    if source.dtype != destination.dtype:
        return Choice(codec, f"{source.dtype} pages become {destination.dtype}")
    return Choice(codec, "configured")


def conversion_between(source: CompatRecord, destination: CompatRecord, *, landing: bool) -> Conversion | None:
    """How ctx's pages become gen's; None where they are alike and nothing is encoded. `landing`: as codec_used.

    Raises:
        PeerError: the codec has no form for such pages.
    """
    if takes_whole_pages(source):
        return None
    (ours,), (theirs,) = ([geometry(record, group) for group in record.groups] for record in (source, destination))
    codec = codec_used(source, destination, landing=landing).codec
    if codec == RAW:
        return None if ours == theirs and ours.tp == 1 else Conversion(ours, theirs)
    from tailrace.transfer.codecs import codec_named  # imports torch, which raw pairs do not need

    return Conversion(ours, theirs, codec_named(codec))


def steps_between(source: CompatRecord, destination: CompatRecord, *, landing: bool) -> tuple[str, ...]:
    """The lossy steps that pages of this pair may come through, the least lossy first; none: their bits arrive."""
    codec = codec_used(source, destination, landing=landing).codec
    return lossy_steps(codec, source.dtype, destination.dtype)


def exact_between(source: CompatRecord, destination: CompatRecord, *, landing: bool) -> bool:
    """Whether the reader's pages get the very bits of the other's."""
    return not steps_between(source, destination, landing=landing)


Told = Callable[[str, Choice], None]
"""Called with a peer's boot id and what its pages go through from now on; from a helper thread where it is `auto`."""


def _tell(told: Told, boot: str, conversion: Conversion | None, choice: Choice) -> None:
    told(boot, choice)
    if conversion is not None and conversion.link is not None and conversion.codec is not None:
        conversion.codec.told = lambda chosen: told(boot, chosen)  # type: ignore[attr-defined]


def answer_hello(
    hello: Hello, worker: str, boot: str, compat: CompatRecord, transports: Sequence[Transport], told: Told
) -> Hello | Refuse:
    """Ctx's answer: what gen needs for each of the transports it named that works here."""
    wrong = mismatch(compat, hello.compat)
    if wrong is not None:
        return Refuse(wrong.field, str(wrong.mine), str(wrong.theirs))
    infos: dict[str, bytes] = {}
    for transport in transports:
        if transport.name not in hello.transports:
            continue
        try:
            if transport.units_per_grant:  # only one that writes to its reader must reach it
                conversion = conversion_between(compat, hello.compat, landing=True)
                _tell(told, hello.boot, conversion, codec_used(compat, hello.compat, landing=True))
                transport.connect(hello.boot, hello.transports[transport.name], conversion)
        except PeerError as error:
            fields = {"worker": hello.worker, "transport": transport.name, "reason": str(error)}
            log.info("transport_not_usable", extra={"fields": fields})
            continue
        infos[transport.name] = transport.info_for(hello.boot)
    return Hello(worker, boot, compat, infos)


class PairEvents(Protocol):
    """Who is told. All calls come on the event loop."""

    def pair_up(self, boot: str, transport: Transport, compat: CompatRecord) -> None: ...

    def pair_down(self, boot: str) -> None: ...

    def peer_frame(self, link: Link, frame: Any) -> None: ...


class PairDialer:
    """Gen's side: keeps one link, and one working transport, to each wanted ctx.

    Args:
        worker: our name; `me` and `secret` are for the links.
        transports: in order of preference; all that may be used.
        news: set when they must be polled: a probe comes in like anything else.
    """

    def __init__(
        self, worker: str, me: Identity, secret: bytes, compat: CompatRecord, transports: Sequence[Transport],
        events: PairEvents, news: asyncio.Event,
    ) -> None:  # fmt: skip
        self._worker, self._me, self._secret, self._compat = worker, me, secret, compat
        self._transports, self._events, self._news = transports, events, news
        self._wanted: dict[str, PeerAddress] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._links: dict[str, Link] = {}
        self.ready: dict[str, Transport] = {}
        self.refused: dict[str, str] = {}  # boot id -> why, for those of the wanted that were refused

    def want(self, peers: Iterable[PeerAddress]) -> None:
        """These are to be paired; a whole set. Those no longer in it stay until `retire`."""
        self._wanted = {peer.boot: peer for peer in peers}
        for boot, peer in self._wanted.items():
            if boot not in self._tasks:
                task = self._tasks[boot] = asyncio.create_task(self._keep(peer), name=f"pair-{peer.worker}")
                task.add_done_callback(self._ended)

    @staticmethod
    def _ended(task: asyncio.Task[None]) -> None:
        """A fault that nobody foresaw: books and cores may be half changed, so the event loop's handler is told, which
        ends the process. (A probe's is another matter: it changes nothing of ours, see `_probe`.)"""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what = {"message": f"{task.get_name()} failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(what)

    def also(self, peer: PeerAddress) -> None:
        """One more, besides the set."""
        if peer.boot not in self._wanted:
            self.want([*self._wanted.values(), peer])

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    def surplus(self) -> list[str]:
        """Boot ids that have a link or a task and are not wanted."""
        return [boot for boot in self._tasks if boot not in self._wanted]

    def retire(self, boot: str) -> None:
        """End a pair: nothing of ours refers to it, or it is dead."""
        self._wanted.pop(boot, None)
        self.refused.pop(boot, None)
        task = self._tasks.pop(boot, None)
        if task is not None:
            task.cancel()
        link = self._links.pop(boot, None)
        if link is not None:
            link.close("the pair is over")
        if self.ready.pop(boot, None) is not None:
            self._events.pair_down(boot)

    def reset(self, boot: str) -> None:
        """Pair anew: the link is closed and dialled again. The caller has disconnected the transport."""
        link = self._links.get(boot)
        if link is not None:
            link.close("the pair is reset")

    def send(self, boot: str, frame: object) -> None:
        """Dropped if there is no link."""
        link = self._links.get(boot)
        if link is not None and boot in self.ready:
            link.send(frame)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for boot in list(self._tasks):
            self.retire(boot)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------------- one peer

    async def _keep(self, peer: PeerAddress) -> None:
        retry_s, said = FIRST_RETRY_S, ""
        while True:
            try:
                await self._serve(peer)
                retry_s, said = FIRST_RETRY_S, ""
            except PairRefused as error:
                if peer.boot not in self.refused:
                    log.error("pair_refused", extra={"fields": {"worker": peer.worker, "reason": str(error)}})
                self.refused[peer.boot] = str(error)
                retry_s = REFUSED_RETRY_S
            except (OSError, PeerError) as error:
                if str(error) != said:
                    log.warning("pair_not_made", extra={"fields": {"worker": peer.worker, "reason": str(error)}})
                said = str(error)
            await asyncio.sleep(retry_s)
            retry_s = min(LAST_RETRY_S, retry_s * 2)

    async def _serve(self, peer: PeerAddress) -> None:
        """One link's life. Returns when it ends after the pair was ready."""
        boot, session = peer.boot, _Session(self._events)
        link = await dial(
            peer.host, peer.port, self._me, self._secret,
            expect_boot=boot, on_frame=session.on_frame, on_close=session.on_close,
        )  # fmt: skip
        self._links[boot] = link
        try:
            transport, compat = await self._agree(link, session, peer)
            self.refused.pop(boot, None)
            self.ready[boot] = transport
            fields = {"worker": peer.worker, "boot": boot, "transport": transport.name}
            log.info("pair_ready", extra={"fields": fields})
            self._events.pair_up(boot, transport, compat)
            await session.closed.wait()
        finally:
            if self._links.get(boot) is link:
                del self._links[boot]
            link.close("pairing ended")
            if self.ready.pop(boot, None) is not None:
                self._events.pair_down(boot)

    async def _agree(self, link: Link, session: _Session, peer: PeerAddress) -> tuple[Transport, CompatRecord]:
        """The first transport that both have and that brings a page over intact, and the peer's record."""
        tried = []
        for transport in self._transports:
            info = {transport.name: transport.info_for(peer.boot)}
            link.send(Hello(self._worker, self._me.boot, self._compat, info))
            answer = await session.answer()
            if isinstance(answer, Refuse):
                raise PairRefused(answer.field, answer.theirs, answer.mine)
            wrong = mismatch(self._compat, answer.compat)
            if wrong is not None:
                link.send(Refuse(wrong.field, str(wrong.mine), str(wrong.theirs)))
                raise wrong
            why = await self._try(transport, peer.boot, answer)
            if why is None:
                return transport, answer.compat
            tried.append(f"{transport.name}: {why}")
        raise PeerError(f"no transport reaches {peer.worker}: {'; '.join(tried) or 'none configured'}")

    async def _try(self, transport: Transport, boot: str, answer: Hello) -> str | None:
        """None if it works, else why not."""
        info = answer.transports.get(transport.name)
        if info is None:
            return "the peer does not offer it"
        try:
            landing = transport.units_per_grant > 0
            transport.connect(boot, info, conversion_between(answer.compat, self._compat, landing=landing))
        except PeerError as error:
            return str(error)
        self._news.set()
        why = await self._probe(transport, boot)
        if why is not None:
            transport.disconnect(boot)
        return why

    @staticmethod
    async def _probe(transport: Transport, boot: str) -> str | None:
        """None if known bytes come over, else why not. Whatever it raises (a kernel cannot be compiled, say) says only
        that this transport does not work for this pair: it runs in a thread of its own and writes nothing of ours."""
        probing = asyncio.get_running_loop().run_in_executor(None, transport.probe, boot)
        try:
            await asyncio.wait([probing])
        finally:
            probing.cancel()  # if the pair was retired meanwhile, nobody asks for its end
        error = probing.exception()
        if error is not None:
            fields = {"boot": boot, "transport": transport.name, "reason": repr(error)}
            log.error("probe_failed", exc_info=error, extra={"fields": fields})
            return f"its probe failed: {error!r}"
        return None if probing.result() else "the probe's page did not come over intact"


class _Session:
    """What one link to a ctx brings: answers while pairing, then frames."""

    def __init__(self, events: PairEvents) -> None:
        self._events = events
        self._answers: asyncio.Queue[Hello | Refuse | None] = asyncio.Queue()  # None: the link closed
        self.closed = asyncio.Event()

    async def answer(self) -> Hello | Refuse:
        try:
            async with asyncio.timeout(HELLO_S):
                answer = await self._answers.get()
        except TimeoutError:
            raise PeerError(f"no Hello within {HELLO_S:g} s") from None
        if answer is None:
            raise PeerError("the link closed during pairing")
        return answer

    def on_frame(self, link: Link, frame: Any) -> None:
        if isinstance(frame, Hello | Refuse):
            self._answers.put_nowait(frame)
        else:
            self._events.peer_frame(link, frame)

    def on_close(self, link: Link, reason: str) -> None:
        self.closed.set()
        self._answers.put_nowait(None)


def preferred(transports: Sequence[Transport], choice: str) -> list[Transport]:
    """Those that may be used: the chosen one, or for `auto` all, in the order given."""
    return [t for t in transports if choice in ("auto", t.name)]
