"""Transport `peer` beyond the conformance suite: what keeps a mapping open, what is refused, and waiting for memory."""

from __future__ import annotations

import time

from transport_peers import KEY, assert_moved, units_for

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
    assert len(move.ok) == len(SRC) and len(provider.closed) == 1
    assert_moved(gen, units, owner=1)
    gen.pair(ctx)
    gen.transport.disconnect("c1")
    assert len(provider.closed) == 2


def test_a_probe_under_way_keeps_the_mapping_open(make_gen):
    gen, _, _ = paired(make_gen)
    provider, reader = gen.transport._pool.provider, gen.transport._reader
    reader.gate.clear()
    from in_thread import in_thread  # noqa: PLC0415

    with in_thread(lambda: gen.transport.probe("c1")) as probe:
        time.sleep(0.05)
        gen.transport.disconnect("c1")
        assert provider.closed == []
        reader.gate.set()
    assert probe and len(provider.closed) == 1
