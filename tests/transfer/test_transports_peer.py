"""Transport `peer` beyond the conformance suite: what keeps a mapping open, what is refused, and waiting for memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from device_peers import SharedDevice, SharedReader, new_pool
from transport_peers import (
    KEY,
    ChildCtx,
    assert_moved,
    assert_quiet,
    layout,
    random_pages,
    units_for,
    wait_for,
    worker_name,
)

from tailrace.kernels.device_memory import OUT_OF_MEMORY, CudaIpc, DeviceError, Memory
from tailrace.kv_cache import device_pool
from tailrace.kv_cache.arena import Arena, arena_name, mapped_elsewhere
from tailrace.kv_cache.device_pool import KNOWN_BYTES, DevicePool
from tailrace.model.errors import ConfigError, PeerError
from tailrace.transfer.page_plan import PoolGeometry
from tailrace.transfer.transports.base import ReadJob
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.peer import READ_LIMIT_S, PeerTransport, ReadStuck
from tailrace.transfer.transports.peer_mapping import PoolInfo

SRC = list(range(1, 9))


def paired(make_gen, **options):
    gen = make_gen("peer", 4096, 64, **options)
    ctx = gen.new_ctx("c1", 64, child=False)
    return gen, ctx, units_for(SRC, ctx.write(SRC, owner=1), [page + 20 for page in SRC])


# ------------------------------------------------------------------------------------------------------- the mapping


def test_a_mapping_is_closed_when_its_pair_ends_but_not_under_a_read(make_gen):
    gen, ctx, units = paired(make_gen)
    provider, reader = gen.transport._pool.provider, gen.transport._reader
    reader.gate.clear()
    move = gen.start(KEY, ctx, units)
    gen.transport.disconnect("c1")
    for _ in range(20):
        gen.step()
        time.sleep(0.001)
    assert move.jobs and provider.closed == [], "closed under a read"
    reader.gate.set()
    gen.finish(move)
    assert len(move.ok) == len(SRC)
    wait_for(lambda: len(provider.closed) == 1, "the mapping to be closed")
    assert_moved(gen, units, owner=1)
    gen.pair(ctx)
    assert gen.transport.probe("c1")
    gen.transport.disconnect("c1")
    wait_for(lambda: len(provider.closed) == 2, "the mapping to be closed")


def test_a_mapping_that_cannot_be_closed_is_logged_and_the_pair_is_made_anew(make_gen, monkeypatch, caplog):
    gen, ctx, units = paired(make_gen)
    assert gen.transport.probe("c1")
    provider = gen.transport._pool.provider

    def fails(memory: Memory) -> None:
        raise DeviceError("cudaIpcCloseMemHandle says 1", 1)

    monkeypatch.setattr(provider, "close", fails)
    with caplog.at_level(logging.ERROR):
        gen.transport.disconnect("c1")
        wait_for(lambda: "peer_not_unmapped" in caplog.text, "the log")
    monkeypatch.undo()
    gen.pair(ctx)
    gen.finish(gen.start(KEY, ctx, units))
    assert_moved(gen, units, owner=1)


def test_a_probe_under_way_keeps_the_mapping_open(make_gen):
    gen, _, _ = paired(make_gen)
    provider, reader = gen.transport._pool.provider, gen.transport._reader
    reader.gate.clear()
    found: list[bool] = []
    probe = threading.Thread(target=lambda: found.append(gen.transport.probe("c1")))
    probe.start()
    wait_for(lambda: reader.launched == 3, "the probe's reads")
    gen.transport.disconnect("c1")
    assert provider.closed == [], "closed under a probe"
    reader.gate.set()
    probe.join(10)
    assert found == [True]
    wait_for(lambda: len(provider.closed) == 1, "the mapping to be closed")


def test_a_probe_that_the_device_does_not_end_in_time_fails_and_may_be_made_again(make_gen, monkeypatch, caplog):
    """What it raised would end the task that pairs, and nobody would try again."""
    gen, _, _ = paired(make_gen)

    def late(memory: Memory, start: int, nbytes: int) -> bytes:
        raise DeviceError(f"{nbytes} bytes did not come within 10 s", 0)

    monkeypatch.setattr(gen.transport._reader, "fetch", late)
    with caplog.at_level(logging.WARNING):
        assert not gen.transport.probe("c1")
    assert "peer_not_read" in caplog.text
    monkeypatch.undo()
    assert gen.transport.probe("c1")
    gen.transport.disconnect("c1")
    wait_for(lambda: len(gen.transport._pool.provider.closed) == 1, "the mapping, which no probe holds, to be closed")


def test_a_probe_that_brings_other_bytes_than_the_known_fails(make_gen):
    gen, ctx, _ = paired(make_gen)
    assert gen.transport.probe("c1")
    known = ctx.arena.pool.memory.tensor[ctx.arena.pool.known_at :]
    known[KNOWN_BYTES - 1] ^= 1
    assert not gen.transport.probe("c1")
    known[KNOWN_BYTES - 1] ^= 1
    assert gen.transport.probe("c1") and not gen.transport.probe("nobody")


def test_a_ctx_killed_under_a_read_and_started_again_is_read_from_both_boots(make_gen):
    """The dead one's memory is read to the end and given up; its successor is mapped beside it meanwhile."""
    gen = make_gen("peer", 4096, 64)
    old = gen.new_ctx("boot1", 64, child=True)
    assert isinstance(old, ChildCtx)
    provider, reader = gen.transport._pool.provider, gen.transport._reader
    units = units_for(SRC, old.write(SRC, owner=1), [page + 20 for page in SRC])
    reader.gate.clear()
    move = gen.start(("a", 1), old, units)
    old.kill()
    del gen.ctxs["boot1"]
    new = gen.new_ctx("boot2", 64, child=True)
    fresh = units_for(SRC, new.write(SRC, owner=2), [page + 40 for page in SRC])
    after = gen.start(("a", 2), new, fresh)
    gen.transport.disconnect("boot1")
    assert provider.closed == []
    reader.gate.set()
    gen.finish(move, after)
    assert_moved(gen, units, owner=1)
    assert_moved(gen, fresh, owner=2)
    wait_for(lambda: provider.closed, "the dead one's memory to be given back")
    assert len(provider.closed) == 1, "the other's is not"
    old.close()
    assert_quiet(gen)


def test_a_read_that_the_device_does_not_end_ends_the_process_and_is_never_answered(make_gen):
    now = [0.0]
    gen, ctx, units = paired(make_gen, clock=lambda: now[0])
    gen.transport._reader.gate.clear()
    move = gen.start(KEY, ctx, units)
    now[0] = READ_LIMIT_S - 1
    gen.step()
    now[0] = READ_LIMIT_S + 1
    with pytest.raises(ReadStuck, match="8 pages has not ended for 60 s"):
        gen.step()
    assert move.jobs
    now[0] = 0.0
    gen.transport._reader.gate.set()
    gen.finish(move)


def test_closing_waits_for_reads_under_way_no_longer_than_it_says(make_gen, monkeypatch, caplog):
    gen, ctx, units = paired(make_gen)
    provider, reader = gen.transport._pool.provider, gen.transport._reader
    monkeypatch.setattr("tailrace.transfer.transports.peer.CLOSE_LIMIT_S", 0.2)
    reader.gate.clear()
    gen.start(KEY, ctx, units)
    with caplog.at_level(logging.ERROR):
        gen.transport.close()
    assert "reads_unfinished" in caplog.text and provider.closed == []
    reader.gate.set()
    gen.transport.close()
    assert len(provider.closed) == 1


def test_a_read_of_many_pages_goes_in_slices_and_each_page_is_judged(make_gen, monkeypatch):
    """As a large hand-off does, in small: a first, three middle and a last launch."""
    for name, value in (("_FIRST", 4), ("_MOST", 16), ("_LAST", 8)):
        monkeypatch.setattr(f"tailrace.transfer.transports.peer.{name}", value)
    gen = make_gen("peer", 4096, 64)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = random_pages(random.Random(1), 60, 64)
    units = units_for(src, ctx.write(src, owner=1), random_pages(random.Random(2), 60, 64))
    gen.transport._reader.gate.clear()
    move = gen.start(KEY, ctx, units)
    assert gen.transport._reader.launched == 5
    used_anew = {0, 3, 4, 19, 20, 50, 52, 59}  # at the borders of slices
    ctx.write([src[i] for i in used_anew], owner=2)
    gen.transport._reader.gate.set()
    gen.finish(move)
    assert {d.ordinal for d in move.stale} == used_anew
    assert [d.ordinal for d in move.ok] == [i for i in range(60) if i not in used_anew]
    assert_moved(gen, [unit for unit in units if unit[0].ordinal not in used_anew], owner=1)
    assert_quiet(gen)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"provider": "cuda_vmm"}, "handed over by cuda_vmm, ours by shared"),
        ({"version": 2}, "not of version 1"),
        ({"num_pages": 65}, "65 pages of 4096 bytes and"),
        ({"num_pages": 63}, "64 generation numbers for 63 pages"),
        ({"bytes_per_page": 2048}, "2048 bytes, ours 4096"),
        ({"num_pages": -64}, "-64 pages"),
        ({"num_pages": -64, "bytes_per_page": -4096}, "-64 pages"),
        ({"known_at": 1 << 40}, "in memory of"),
        ({"nbytes": 65 * 4096 - 1}, "from 262144 on, 4096 known ones in memory of 266239 bytes"),
        ({"known_at": 64 * 4096 + 1}, "from 262145 on"),
        ({"known_at": 66 * 4096}, "from 270336 on"),
        ({"arena": "tailrace-a-b-nobody"}, "cannot be opened"),
        ({"arena": "../x"}, "not an arena name"),
        ({"nbytes": "many"}, "not of version 1"),
    ],
)
def test_what_a_peer_says_wrongly_of_its_memory_is_refused_by_name(make_gen, change, why):
    gen, ctx, _ = paired(make_gen)
    info = PoolInfo.unpack(ctx.transport.info_for("x"))
    assert PoolInfo.unpack(info.packed()) == info
    with pytest.raises(PeerError, match=why):
        gen.transport.connect("c2", replace(info, **change).packed())
    assert "c2" not in gen.transport._peers


def test_memory_that_is_gone_fails_the_probe_and_every_read_with_its_reason(make_gen, caplog):
    gen, ctx, units = paired(make_gen)
    info = replace(PoolInfo.unpack(ctx.transport.info_for("x")), handle=b"1/fd/99999")
    gen.transport.connect("c2", info.packed())
    with caplog.at_level(logging.WARNING):
        assert not gen.transport.probe("c2")
    assert "no memory behind" in caplog.records[0].fields["reason"]
    gen.transport.read(ReadJob(9, KEY, "c2", tuple(units)))
    (done,) = gen.transport.poll()
    assert "no memory behind" in (done.error or "") and not done.units_ok


def test_pages_that_need_a_conversion_are_refused(make_gen):
    gen, ctx, _ = paired(make_gen)
    plain, wide = PoolGeometry(16, 1, 2, 2, 16, "float32"), PoolGeometry(32, 1, 2, 2, 16, "float32")
    with pytest.raises(PeerError, match="pages of this pair differ"):
        gen.transport.connect("c2", ctx.transport.info_for("x"), Conversion(plain, wide))


# -------------------------------------------------------------------------------------------------------- the pool


class Full(SharedDevice):
    """Has no room until it is asked for the `n`th time."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.asked, self._n = 0, n

    def allocate(self, nbytes: int) -> Memory:
        self.asked += 1
        if self.asked < self._n:
            raise DeviceError(f"no room for {nbytes} bytes", OUT_OF_MEMORY)
        return super().allocate(nbytes)


def _hold(name: str, pipe) -> None:
    arena = Arena.open_read_only(name)
    pipe.send(arena.num_pages)
    pipe.recv()


@pytest.fixture
def old_boot():
    """An earlier boot's arena, unlinked, that another process still maps: as a gen does until it closes its mapping."""
    worker = worker_name("ctx")
    arena = Arena.create(arena_name("test", worker, "boot1"), layout(4096), 8, with_pages=False)
    pipe, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(arena.name, theirs), daemon=True)
    holder.start()
    assert pipe.recv() == 8
    arena.unlink()
    yield worker, arena.name, holder
    holder.kill()
    holder.join(10)


def test_who_still_maps_an_earlier_boot_is_found(old_boot):
    worker, name, holder = old_boot
    assert mapped_elsewhere("test", worker, "x") == {holder.pid: {name}}
    assert mapped_elsewhere("test", worker, name) == {} == mapped_elsewhere("test", worker + "0", "x")
    holder.kill()
    holder.join(10)
    assert mapped_elsewhere("test", worker, "x") == {}


def test_a_restarted_worker_waits_for_the_memory_that_old_mappings_keep_and_says_so(old_boot, monkeypatch, caplog):
    worker, _, holder = old_boot
    monkeypatch.setattr(device_pool, "UNEXPLAINED_LIMIT_S", 0.0)  # it waits for the mapping, not for a while
    waits: list[int] = []
    with caplog.at_level(logging.WARNING):
        pool = DevicePool.create(
            Full(4), "test", worker, "boot2", layout(4096), 8, waiting=lambda: waits.append(1)
        )  # fmt: skip
    assert len(waits) == 3 and [record.msg for record in caplog.records][:1] == ["waiting_for_old_mappings"]
    assert caplog.records[0].fields["mappings"] == 1 and caplog.records[0].fields["pids"] == [holder.pid]
    assert pool.pages.shape == (8, 4096) and not pool.pages.any()
    pool.close()


def test_without_room_and_without_old_mappings_the_pool_is_refused_naming_sizes(monkeypatch):
    monkeypatch.setattr(device_pool, "UNEXPLAINED_LIMIT_S", 0.2)
    worker = worker_name("ctx")
    with pytest.raises(ConfigError, match=r"kv_bytes: the page pool finds no room: 40960 bytes, 5000 are free"):
        DevicePool.create(SharedDevice(room=5000), "test", worker, "b", layout(4096), 8)
    assert not os.path.exists(f"/dev/shm/{arena_name('test', worker, 'b')}")


def test_old_mappings_that_stay_are_named_when_the_waiting_ends(old_boot, monkeypatch):
    worker = old_boot[0]
    monkeypatch.setattr(device_pool, "ROOM_LIMIT_S", 0.2)
    with pytest.raises(ConfigError, match="1 processes still map what an earlier boot had"):
        DevicePool.create(Full(10**6), "test", worker, "b", layout(4096), 8)


def test_a_pool_gives_its_memory_and_its_name_back():
    worker = worker_name("ctx")
    arena, reader = new_pool("peer", "test", worker, "b", layout(4096), 8)
    assert isinstance(reader, SharedReader) and isinstance(PeerTransport(arena.pool, reader), PeerTransport)
    room = arena.pool.provider.room
    arena.unlink()
    assert arena.pool.provider.room == room, "a peer may be reading"
    arena.close()
    assert arena.pool.provider.room == room + 8 * 4096 + 2 * KNOWN_BYTES
    assert not os.path.exists(f"/dev/shm/{arena.name}")


def test_a_job_for_a_peer_that_is_not_mapped_fails_and_nothing_else_does(make_gen):
    gen, ctx, units = paired(make_gen)
    gen.transport.read(ReadJob(77, KEY, "nobody", tuple(units)))
    (done,) = gen.transport.poll()
    assert (done.job, done.error) == (77, "no memory of nobody is mapped")
    assert np.all(gen.arena.pages == 0xEE)


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_a_worker_started_again_on_a_gpu_gets_its_memory_once_its_dead_boot_is_unmapped(make_gen):
    """Two of its pools do not fit the GPU: without the waiting it would die of want of memory."""
    gen = make_gen("peer_cuda", 1 << 20, 16)
    _, total = CudaIpc().room()
    num_pages, worker = int(0.55 * total) >> 20, worker_name("ctx")
    old = gen.new_ctx("boot1", num_pages, child=True, worker=worker)
    assert isinstance(old, ChildCtx) and gen.transport.probe("boot1")
    src = [1, num_pages - 1]
    units = units_for(src, old.write(src, owner=1), [1, 2])
    old.kill()
    del gen.ctxs["boot1"]
    gen.finish(gen.start(("a", 1), old, units))
    assert_moved(gen, units, owner=1)
    started = time.monotonic()
    threading.Timer(2.0, gen.transport.disconnect, ("boot1",)).start()
    new = gen.new_ctx("boot2", num_pages, child=True, worker=worker)
    assert time.monotonic() - started > 2.0, "there was room for both"
    fresh = units_for(src, new.write(src, owner=2), [3, 4])
    move = gen.start(("a", 2), new, fresh)
    gen.finish(move)
    assert len(move.ok) == 2
    assert_moved(gen, fresh, owner=2)
    old.close()
