"""The router's process part over real sockets: links, answers, the operators' port, faults, being deposed."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from router_scene import COMPAT

from tailrace.model.errors import LedgerError
from tailrace.router.server import RouterDeposed, RouterServer
from tailrace.router.settings import RouterSettings
from tailrace.transfer.links import Identity, dial
from tailrace.transfer.messages import (
    Answer,
    Bind,
    Bound,
    CacheQuery,
    Deaths,
    Done,
    Epoch,
    EpochRefused,
    Heartbeat,
    Peers,
    Place,
    Placed,
    Progress,
    Query,
    Register,
    SetFaults,
    Stats,
)

SECRET = b"s" * 16


class Peer:
    """A process at the other end of a link, with an inbox."""

    def __init__(self, role, name, boot):
        self.me, self.name, self.boot = Identity(role, name, boot), name, boot
        self.inbox, self.closed = asyncio.Queue(), asyncio.Event()
        self.link = None

    async def dial(self, server):
        self.closed.clear()
        self.link = await dial(
            "127.0.0.1", server.port, self.me, SECRET,
            on_frame=lambda link, frame: self.inbox.put_nowait(frame), on_close=lambda link, reason: self.closed.set(),
        )  # fmt: skip
        return self

    async def get(self, kind):
        """The next frame of a kind; others before it are dropped."""
        async with asyncio.timeout(5):
            while True:
                frame = await self.inbox.get()
                if isinstance(frame, kind):
                    return frame

    def register(self, duty):
        self.link.send(Register(self.name, self.boot, duty, duty, "127.0.0.1", 1, 100, 16, 256, 2048, COMPAT, 0, ""))

    def beat(self, pairs=()):
        self.link.send(Heartbeat(self.name, self.boot, "run", 0.0, 100, 0, 0, 0, 0.0, 0, 1e3, 1e9, pairs))


@pytest.fixture
async def server():
    server = RouterServer("router-0", RouterSettings(settle_s=0.0), SECRET, model="tiny", faults=True)
    await server.start("127.0.0.1", operators=("127.0.0.1", 0))
    yield server
    await server.stop()


@pytest.fixture
async def cluster(server):
    """(ctx, gen, ingress) linked, registered and paired."""
    ctx = await Peer("ctx", "ctx-0", "ctx-boot").dial(server)
    gen = await Peer("gen", "gen-0", "gen-boot").dial(server)
    ingress = await Peer("ingress", "ingress-0", "ingress-boot").dial(server)
    ctx.register("ctx"), gen.register("gen")
    await ctx.get(Epoch)
    while [p.boot for p in (await gen.get(Peers)).peers] != ["ctx-boot"]:
        pass
    await gen.get(CacheQuery)
    ctx.beat(), gen.beat(("ctx-boot",))
    while server.ready()["status"] != "ready":
        await asyncio.sleep(0.01)
    return ctx, gen, ingress


PLACE = Place("r", 0, 100, 50, 1, b"", "", 0, None, None, 0, b"n", (), "")


async def test_a_request_goes_from_place_to_bound_and_done(server, cluster):
    ctx, gen, ingress = cluster
    ingress.link.send(PLACE)
    placed = await ingress.get(Placed)
    assert (placed.leg, placed.boot, placed.host) == ("prefill", "ctx-boot", "127.0.0.1")
    ctx.link.send(Progress("r", 0, 100, 100, 0.0, True))
    bind = await gen.get(Bind)
    assert bind.ctx.boot == "ctx-boot" and bind.namespace == b"n"
    gen.link.send(Bound("r", 0, 7))
    assert (await ingress.get(Placed)).leg == "decode"
    ingress.link.send(Done("r", 0, "finished", ""))
    ingress.link.send(Query(7, "cluster"))
    answer = await ingress.get(Answer)
    view = json.loads(answer.text)
    assert answer.number == 7 and view["requests"] == {}
    assert view["claims"] == {"seconds": 0.0, "prefill_tokens": 0, "pages": 0, "seats": 0, "rows": 0}
    assert view["pairs"] == [{"gen": "gen-0", "ctx": "ctx-0", "gen_boot": "gen-boot", "ctx_boot": "ctx-boot"}]


async def test_ingresses_and_operators_are_told_the_same(server, cluster):
    _, _, ingress = cluster
    ingress.link.send(Query(1, "ready"))
    told = json.loads((await ingress.get(Answer)).text)
    assert told == {"status": "ready", "reasons": [], "max_request_tokens": 2048}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.operators_port}") as http:
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()) == (200, told)
        assert (await http.get("/health")).status_code == 200
        pools = (await http.get("/cluster")).json()["pools"]
        assert pools["gen"]["pages"] == {"total": 100, "free": 100, "used": 0}
        assert [w["condition"] for w in pools["ctx"]["workers"]] == ["ready"]


async def test_metrics_of_all_processes_come_together_and_leave_with_their_process(server, cluster):
    ctx, _, ingress = cluster
    labels = {"role": "ctx", "worker": "ctx-0", "model": "tiny", "kind": "wire"}
    name = "tailrace_transfer_bytes"
    ctx.link.send(Stats("ctx", "ctx-0", ((name, "counter", "bytes", ((f"{name}_total", labels, 42.0),)),)))
    ingress.link.send(Query(1, "metrics"))
    await ingress.get(Answer)
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{server.operators_port}/metrics")).text
    assert f'{name}_total{{kind="wire",model="tiny",role="ctx",worker="ctx-0"}} 42.0' in text
    assert 'tailrace_claims{kind="pages",model="tiny",role="router",worker="router-0"} 0.0' in text
    assert 'tailrace_local_prefills_total{model="tiny",reason="fallback",role="router",worker="router-0"} 0.0' in text
    assert 'tailrace_stats_stale{model="tiny",role="router",worker="router-0"} 0.0' in text
    ctx.link.close()
    await ctx.closed.wait()
    while "ctx-boot" in server._links:
        await asyncio.sleep(0.01)
    assert "42.0" not in server.metrics_text()


async def test_unready_is_503_and_says_why():
    server = RouterServer("router-0", RouterSettings(settle_s=0.0, gen_replicas=1), SECRET)
    await server.start("127.0.0.1", operators=("127.0.0.1", 0))
    async with httpx.AsyncClient() as http:
        base = f"http://127.0.0.1:{server.operators_port}"
        answer = await http.get(f"{base}/ready")
        assert answer.status_code == 503 and answer.json()["status"] == "unready"
        assert "no gen worker is there" in answer.json()["reasons"]
        assert (await http.post(f"{base}/debug/faults", json={"faults": {}})).status_code == 404
        assert (await http.get(f"{base}/health")).status_code == 200
    await server.stop()


async def test_faults_go_to_workers_by_name_or_role(server, cluster):
    ctx, gen, _ = cluster
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.operators_port}") as http:
        answer = await http.post("/debug/faults", json={"role": "gen", "faults": {"hold": 3}})
        assert (answer.status_code, answer.json()) == (200, {"told": ["gen-0"]})
        assert json.loads((await gen.get(SetFaults)).faults) == {"hold": 3}
        answer = await http.post("/debug/faults", json={"worker": "ctx-0", "faults": {}})
        assert answer.json() == {"told": ["ctx-0"]} and (await ctx.get(SetFaults)).faults == "{}"
        assert (await http.post("/debug/faults", json={"worker": "nobody", "faults": {}})).status_code == 404
        for wrong in ({}, [], {"faults": 1}, {"faults": {}, "worker": 1}, {"faults": {}, "rolle": "gen"}):
            assert (await http.post("/debug/faults", json=wrong)).status_code == 400
        assert (await http.post("/debug/faults", content=b"{")).status_code == 400
        assert (await http.post("/debug/faults", content=b" " * (1 << 20) + b"{}")).status_code == 413


async def test_a_worker_that_dials_again_replaces_its_own_link(server, cluster):
    ctx, gen, ingress = cluster
    again = await Peer("ctx", "ctx-0", "ctx-boot").dial(server)
    await asyncio.wait_for(ctx.closed.wait(), 5)
    again.register("ctx")
    await again.get(Epoch)
    again.beat()
    ingress.link.send(PLACE)
    assert (await ingress.get(Placed)).boot == "ctx-boot"
    assert gen.inbox.empty()


async def test_a_reported_death_reaches_everybody_and_the_dead_is_turned_away(server, cluster):
    ctx, gen, ingress = cluster
    server.report_dead("ctx-boot", "process ended")
    for peer in (gen, ingress, ctx):
        assert (await peer.get(Deaths)).boots == ("ctx-boot",)
    await asyncio.wait_for(ctx.closed.wait(), 5)
    back = await Peer("ctx", "ctx-0", "ctx-boot").dial(server)
    back.register("ctx")
    assert (await back.get(Deaths)).boots == ("ctx-boot",)
    await asyncio.wait_for(back.closed.wait(), 5)


async def test_nonsense_closes_one_link_only(server, cluster):
    ctx, gen, ingress = cluster
    ctx.link.send(Placed("r", 0, "prefill", "w", "b", "h", 1))
    await asyncio.wait_for(ctx.closed.wait(), 5)
    ingress.link.send(Query(1, "secrets"))
    await asyncio.wait_for(ingress.closed.wait(), 5)
    assert not gen.closed.is_set()


async def test_a_deposed_router_ends(server, cluster):
    ctx, _, ingress = cluster
    ingress.link.send(PLACE)
    await ingress.get(Placed)
    ctx.link.send(EpochRefused(9, "another"))
    with pytest.raises(RouterDeposed, match="another"):
        await asyncio.wait_for(server.serve_forever(), 5)


async def test_wrong_books_end_the_router(server, cluster):
    _, _, ingress = cluster
    server.core.state.prefill.claim(("r", 0), "ctx-boot", 1)
    ingress.link.send(PLACE)
    with pytest.raises(LedgerError):
        await asyncio.wait_for(server.serve_forever(), 5)


async def test_serve_forever_returns_when_the_router_is_stopped(server):
    task = asyncio.create_task(server.serve_forever())
    await asyncio.sleep(0.05)
    await server.stop()
    await asyncio.wait_for(task, 5)


async def test_a_taken_operators_port_is_an_error_that_names_it(server):
    second = RouterServer("router-1", RouterSettings(), SECRET)
    with pytest.raises(OSError, match=str(server.operators_port)):
        await second.start("127.0.0.1", operators=("127.0.0.1", server.operators_port))
    await second.stop()


async def test_time_runs_without_frames(server, cluster):
    """A worker whose link is gone is dead after its grace, although nobody says anything."""
    ctx, gen, _ = cluster
    ctx.link.close()
    async with asyncio.timeout(6):
        assert (await gen.get(Deaths)).boots == ("ctx-boot",)
