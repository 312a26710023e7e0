"""Back-flow between two real nodes: over shared memory and in one process; over nixl it is unsupported, by name."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
from handoff_sim import NAMESPACE, PAGE
from node_rig import KEY, until

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.transfer.loop_events import Turn
from tailrace.transfer.messages import Deaths, PageDescriptor

HASHER = BlockHasher(b"s", PAGE)
IDS = list(range(16))


def publish(node, memory, ids, fill):
    """Pages with known bytes, published and let go; returns them."""
    pages = node.kv.allocate(len(ids) // PAGE)
    for i, page in enumerate(pages):
        memory[page] = fill + i
    node.kv.publish(NAMESPACE, HASHER.hash_blocks("s", ids), pages, len(ids))
    node.kv.release(pages)
    return pages


def turn(rig, pages):
    described = tuple(PageDescriptor(0, i, p, rig.gen.kv.descriptor_generation(p)) for i, p in enumerate(pages))
    return Turn(KEY, rig.ctx.config.boot, NAMESPACE, HASHER.hash_blocks("s", IDS), len(IDS), described)


def result(rig, name):
    return rig.ctx.metrics.value("tailrace_backflow_offers_total", result=name)


def known(node):
    hit = node.kv.match_prefix(NAMESPACE, HASHER.hash_blocks("s", IDS), len(IDS), whole=True)
    node.kv.release(hit.pages)
    return hit.pages


def connected(one_rig, kind, **ctx):
    rig = one_rig(kind, ctx={"backflow": True, **ctx}, gen={"backflow": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    return rig


@pytest.mark.parametrize("kind", ["in_process", "shm"])
def test_a_finished_turn_is_read_by_ctx_byte_for_byte(one_rig, kind):
    rig = connected(one_rig, kind)
    publish(rig.ctx, rig.memory["c0"], IDS[:PAGE], 90)  # the first page is here, and stays as it is
    pages = publish(rig.gen, rig.memory["g0"], IDS, 100)
    rig.gen.turn_ended(turn(rig, pages))
    until(lambda: result(rig, "read") == 1)
    found = known(rig.ctx)
    assert [int(rig.memory["c0"][page][0]) for page in found] == [90, 101, 102, 103]
    assert all((rig.memory["c0"][page] == rig.memory["c0"][page][0]).all() for page in found)
    assert rig.ctx.metrics.value("tailrace_backflow_tokens_total") == 3 * PAGE
    until(lambda: rig.ctx.idle and rig.ctx.kv.counts().used == 0)


def test_pages_that_gen_has_used_anew_are_not_taken(one_rig):
    rig = connected(one_rig, "shm")
    pages = publish(rig.gen, rig.memory["g0"], IDS, 100)
    offered = turn(rig, pages)
    rig.gen.kv.retract(pages[2:])
    used = rig.gen.kv.allocate(rig.gen.kv.counts().free)
    rig.memory["g0"][used] = 7
    rig.gen.turn_ended(offered)
    until(lambda: result(rig, "stale") == 1)
    assert [int(rig.memory["c0"][page][0]) for page in known(rig.ctx)] == [100, 101]
    until(lambda: rig.ctx.kv.counts().used == 0)


def mapped_read_only(arena_of):
    """How often this process, in which both nodes run, has the memory of a boot mapped without the right to write."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(" r--s " in line and arena_of in line for line in maps)


@pytest.mark.parametrize("link_closes_first", [True, False])
def test_the_memory_of_a_dead_gen_is_unmapped_whatever_is_known_first(one_rig, link_closes_first):
    rig = connected(one_rig, "shm")
    gone = rig.gen.config.boot
    assert mapped_read_only(gone) == 1
    if link_closes_first:
        rig.gen.stop()
        time.sleep(0.2)
    rig.router.send("c0", Deaths((gone,)))
    until(lambda: mapped_read_only(gone) == 0)


def test_over_nixl_it_is_unsupported_by_name_and_nothing_else_changes(one_rig, caplog):
    with caplog.at_level(logging.WARNING):
        rig = connected(one_rig, "nixl")
    (record,) = [r for r in caplog.records if r.message == "backflow_unsupported"]
    assert record.fields["worker"] == "g0" and "reads its memory" in record.fields["reason"]
    rig.gen.turn_ended(turn(rig, publish(rig.gen, rig.memory["g0"], IDS, 100)))
    until(lambda: result(rig, "unsupported") == 1)
    assert known(rig.ctx) == []


def test_a_ctx_without_it_ignores_what_is_offered(one_rig):
    rig = one_rig("shm", ctx={}, gen={"backflow": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.gen.turn_ended(turn(rig, publish(rig.gen, rig.memory["g0"], IDS, 100)))
    rig.gen.turn_ended(turn(rig, known(rig.gen)))
    until(lambda: not rig.gen._inbox)
    assert known(rig.ctx) == [] and result(rig, "read") == 0
    assert np.count_nonzero(rig.memory["c0"]) == 0
