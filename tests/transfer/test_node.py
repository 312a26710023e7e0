"""Two nodes in one process over real sockets and real transports: pairing, a hand-off, failures, the router's link."""

import json
import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from handoff_sim import layout
from node_rig import COMPAT, CORE, KEY, PAGES, Hub, event, finish, prefill, submit, until

from tailrace.model.errors import ConfigError, LedgerError
from tailrace.transfer.loop_events import Admitted, Arrived, Cancelled, DrainAsked, FaultsSet
from tailrace.transfer.messages import (
    NOT_HELD,
    Bound,
    Cancel,
    Deaths,
    Delta,
    Drain,
    Epoch,
    EpochRefused,
    Fail,
    Heartbeat,
    Holding,
    NotNow,
    PeerAddress,
    Peers,
    Progress,
    Register,
    Renew,
    SetFaults,
    Stats,
    Tokens,
    pack_ids,
    unpack_ids,
)
from tailrace.transfer.metrics import exposition
from tailrace.transfer.node import TICK_S, NodeFailed
from tailrace.transfer.switchboard import CHECK_AFTER_S, Switchboard
from tailrace.transfer.transports.shm import ShmTransport

# ------------------------------------------------------------------------------------------------------------- hand-off


def test_a_prompt_goes_from_ingress_over_ctx_to_gen_and_back(rig):
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(18))
    assert event(rig.ctx, Arrived).submit.attempt == 0
    pages = prefill(rig, 18)
    assert rig.router.expect(Progress).tokens_total == 18
    rig.bind(18)
    assert rig.router.expect(Bound).pages == 5
    finish(rig, 18, pages)
    first = rig.ingress.expect(Tokens).deltas[0]
    assert unpack_ids(first.ids) == [3] and first.stamps == {"prefill": 0.1}
    admitted = event(rig.gen, Admitted)
    assert admitted.handoff.num_tokens == 18 and admitted.num_matched_tokens == 0
    moved = admitted.moved
    assert moved is not None and (moved.pages, moved.pages_skipped, moved.verified) == (5, 0, False)
    assert moved.logical_bytes == 5 * layout().bytes_per_page <= moved.wire_bytes and moved.seconds == admitted.wire_s
    for ordinal, page in enumerate(admitted.pages):
        expected = rig.memory["c0"][pages[ordinal]]
        assert np.array_equal(rig.memory["g0"][page], expected) and expected[0] == (ordinal * 7 + (4, 2)[ordinal == 4])
    until(lambda: rig.ctx.kv.counts().used == 0 and rig.ctx.idle)
    # the decode leg: tokens wait until the ingress has attached its link, then come merged
    for i in range(3):
        rig.gen.tokens([Delta(*KEY, 0, 1 + i, pack_ids((10 + i,)), (), None, None, (), 0, {})])
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", Renew((KEY,), 5.0))
    rig.gen.tokens([Delta(*KEY, 0, 4, pack_ids((13,)), (), "length", None, (), 0, {})])
    got = []
    while len(got) < 4:
        for delta in rig.ingress.expect(Tokens).deltas:
            assert delta.start == 1 + len(got)
            got += unpack_ids(delta.ids)
    assert got == [10, 11, 12, 13] and delta.finish == "length"
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(KEY, "finished")
    until(lambda: rig.gen.idle and rig.gen.kv.counts().used == 0)
    moved = rig.gen.metrics.value("tailrace_transfer_bytes_total", kind="wire", transport=rig.kind, codec="raw")
    assert moved == 5 * layout().bytes_per_page


def test_gen_reads_the_first_chunks_before_the_last_is_computed(rig):
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = rig.ctx.kv.allocate(4)
    rig.ctx.chunk_launched(KEY, False, 1.0)
    rig.memory["c0"][pages[0]] = 77
    rig.ctx.chunk_done(KEY, pages, 6, 1.0)
    rig.bind(16)
    until(lambda: rig.gen.metrics.value("tailrace_transfer_bytes_total", kind="wire", transport=rig.kind, codec="raw"))
    assert rig.ctx.kv.counts().pinned == 2, "the open page is pinned too, but not told"
    assert (rig.memory["g0"] == 77).all(axis=1).sum() == 1
    rig.ctx.failed(KEY, "internal", "stopped here", False)
    rig.ctx.kv.release(pages)
    assert rig.ingress.expect(Fail).code == "internal"
    until(lambda: rig.gen.kv.counts().used == 0 and rig.ctx.kv.counts().used == 0)


def test_a_cancel_reaches_the_loop_and_frees_both_sides(rig):
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    rig.ingress.dial(rig.gen)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16)
    rig.bind(16)
    rig.router.expect(Bound)
    rig.ingress.send("c0", Cancel(*KEY, "client"))
    rig.ingress.send("g0", Cancel(*KEY, "client"))
    assert event(rig.ctx, Cancelled) == Cancelled(KEY, "client")
    rig.ctx.kv.release(pages)
    rig.ctx.ended(KEY, "cancelled")
    until(lambda: rig.gen.kv.counts().used == 0 and rig.ctx.kv.counts().used == 0)
    until(lambda: rig.gen.idle and rig.ctx.idle)


def test_the_books_are_recounted_once_nothing_has_come_for_a_while(one_rig):
    rig = one_rig()
    checks: list[float] = []
    rig.gen.kv.check, real = (lambda: (checks.append(time.monotonic()), real())), rig.gen.kv.check
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", submit(8, leg="local"))
    event(rig.gen, Arrived)
    ended = time.monotonic()
    rig.gen.ended(KEY, "finished")
    until(lambda: checks)
    time.sleep(3 * TICK_S)
    assert len(checks) == 1 and checks[0] - ended >= CHECK_AFTER_S


def test_a_local_prefill_needs_no_peer(one_rig):
    rig = one_rig()
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", submit(8, leg="local"))
    assert event(rig.gen, Arrived).submit.leg == "local"
    rig.gen.tokens([Delta(*KEY, 0, 0, pack_ids((9,)), (), "length", None, (), 0, {})])
    rig.gen.ended(KEY, "finished")
    assert rig.ingress.expect(Tokens).deltas[0].finish == "length"
    until(lambda: rig.gen.idle)


def test_a_leg_that_the_duty_excludes_is_refused(one_rig):
    rig = one_rig()
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", submit(8))
    refused = rig.ingress.expect(Fail)
    assert refused.code == "refused" and refused.retryable


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_held_transfer_keeps_its_pages_quarantined_after_a_cancel(one_rig):
    """A1, over shared memory and sockets."""
    rig = one_rig(gen={"faults": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.router.send("g0", SetFaults(json.dumps({"hold_before_page": 1, "poison": True})))
    assert event(rig.gen, FaultsSet).poison
    rig.ingress.dial(rig.ctx)
    rig.ingress.dial(rig.gen)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16)
    rig.bind(16)
    until(lambda: rig.gen.kv.counts().held == 4)
    time.sleep(0.05)
    rig.ingress.send("g0", Cancel(*KEY, "client"))
    until(lambda: rig.gen.kv.counts().quarantined > 0)
    busy = rig.gen.kv.counts().quarantined
    time.sleep(0.2)
    assert rig.gen.kv.counts().quarantined == busy
    rig.router.send("g0", SetFaults("{}"))
    until(lambda: rig.gen.kv.counts().used == 0)
    finish(rig, 16, pages)


@pytest.mark.parametrize("kind", ["ready", "handoff", "release"])
def test_a_dropped_frame_is_mended_by_a_renewal(one_rig, kind):
    rig = one_rig(ctx={"faults": True}, gen={"faults": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    for worker in ("c0", "g0"):
        rig.router.send(worker, SetFaults(json.dumps({"drop": {kind: 1}})))
        event(rig.nodes[worker], FaultsSet)
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16)
    rig.bind(16)
    rig.router.expect(Bound)
    finish(rig, 16, pages)
    admitted = event(rig.gen, Admitted)
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(KEY, "finished")


@pytest.mark.parametrize("level", ["ERROR", "INFO", "DEBUG"])
def test_a_prompt_goes_over_though_frames_come_late_by_chance_at_every_log_level(one_rig, caplog, level):
    """Case F12 at the protocol: up to 5 ms at each frame of the hand-off."""
    caplog.set_level(level, "tailrace")
    rig = one_rig(ctx={"faults": True}, gen={"faults": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    jitter = dict.fromkeys(("ready", "handoff", "release", "landed"), 0.005)
    for worker in ("c0", "g0"):
        rig.router.send(worker, SetFaults(json.dumps({"jitter_s": jitter})))
        event(rig.nodes[worker], FaultsSet)
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(18))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 18)
    rig.bind(18)
    rig.router.expect(Bound)
    finish(rig, 18, pages)
    admitted = event(rig.gen, Admitted)
    for ordinal, page in enumerate(admitted.pages):
        assert np.array_equal(rig.memory["g0"][page], rig.memory["c0"][pages[ordinal]])
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(KEY, "finished")
    until(lambda: rig.gen.idle and rig.ctx.idle and rig.gen.kv.counts().used == rig.ctx.kv.counts().used == 0)


def test_a_failed_read_is_told_to_the_ingress(one_rig):
    rig = one_rig(gen={"faults": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.router.send("g0", SetFaults(json.dumps({"fail_read": 2})))
    event(rig.gen, FaultsSet)
    rig.ingress.dial(rig.ctx)
    rig.ingress.dial(rig.gen)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16)
    rig.bind(16)
    rig.router.expect(Bound)
    rig.ingress.send("g0", Renew((KEY,), 5.0))
    fail = rig.ingress.expect(Fail)
    assert fail.code == "transfer" and fail.retryable
    until(lambda: rig.gen.kv.counts().used == 0)
    finish(rig, 16, pages)


def test_faults_are_not_obeyed_where_the_config_does_not_allow_them(one_rig):
    rig = one_rig()
    rig.follow(rig.gen)
    rig.router.send("g0", SetFaults(json.dumps({"poison": True})))
    time.sleep(0.1)
    assert rig.gen.poll_events() == []


# ------------------------------------------------------------------------------------------------------- pairing, death


def test_a_pair_whose_records_differ_is_refused_by_name_and_both_go_on(one_rig):
    """A8, A17."""
    rig = one_rig(ctx={"compat": replace(COMPAT, dtype="float16")})
    rig.follow(rig.ctx, rig.gen)
    rig.router.send("g0", Peers((rig.peer(rig.ctx),)))
    until(lambda: rig.gen.refused_pairs)
    (why,) = rig.gen.refused_pairs.values()
    assert "dtype" in why and "float16" in why and "float32" in why
    rig.bind(8)
    assert rig.router.expect(NotNow).why == "pair"
    until(lambda: rig.gen.metrics.value("tailrace_pairs", state="refused") == 1)
    rig.router.forget()
    rig.router.expect(Heartbeat)
    rig.router.expect(Heartbeat)


def test_a_ctx_at_the_address_of_another_boot_is_not_paired(one_rig):
    """B10, B13."""
    rig = one_rig()
    rig.follow(rig.gen)
    wrong = PeerAddress("c0", "another boot", *rig.ctx.address)
    rig.router.send("g0", Peers((wrong,)))
    time.sleep(0.2)
    assert not rig.gen.ready_pairs
    rig.router.send("g0", Peers((rig.peer(rig.ctx),)))
    until(lambda: list(rig.gen.ready_pairs) == [rig.ctx.config.boot])


def test_a_bind_to_an_unpaired_ctx_starts_the_pairing(one_rig):
    rig = one_rig()
    rig.follow(rig.ctx, rig.gen)
    rig.bind(8)
    assert rig.router.expect(NotNow).why == "pair"
    until(lambda: rig.gen.ready_pairs)


def test_a_ctx_that_stops_is_paired_anew_after_its_restart(one_rig):
    rig = one_rig()
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    old = rig.ctx.config.boot
    rig.ctx.stop()
    until(lambda: not rig.gen.ready_pairs)
    rig.router.send("g0", Deaths((old,)))
    rig.ctx = rig.node("ctx", "c0", port=rig.ctx.address[1])
    rig.router.send("g0", Peers((rig.peer(rig.ctx),)))
    until(lambda: list(rig.gen.ready_pairs) == [rig.ctx.config.boot])


def test_what_a_dead_ctx_announced_is_decoded_after_its_generation_numbers_were_checked(one_rig):
    rig = one_rig(gen={"faults": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.router.send("g0", SetFaults(json.dumps({"hold_before_page": 1})))
    event(rig.gen, FaultsSet)
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16)
    rig.bind(16)
    rig.router.expect(Bound)
    finish(rig, 16, pages)
    rig.ingress.expect(Tokens)
    time.sleep(0.1)
    rig.ctx.stop()
    rig.router.send("g0", Deaths((rig.ctx.config.boot,)))
    time.sleep(0.1)
    rig.router.send("g0", SetFaults("{}"))
    found = []
    until(lambda: found.extend(rig.gen.poll_events()) or any(isinstance(e, Admitted) for e in found))
    admitted = next(e for e in found if isinstance(e, Admitted))
    assert np.array_equal(rig.memory["g0"][list(admitted.pages)], rig.memory["c0"][pages])
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(KEY, "finished")
    until(lambda: rig.gen.kv.counts().used == 0)


# --------------------------------------------------------------------------------------------------------------- router


def test_the_first_router_of_an_epoch_is_kept_and_others_are_refused(one_rig):
    rig = one_rig()
    rig.gen.set_router("127.0.0.1", rig.port)
    register = rig.router.expect(Register)
    assert (register.epoch, register.router_boot) == (0, "")
    rig.router.send("g0", Epoch(5, "r5"))
    rig.router.expect(Holding)
    for offer in (Epoch(4, "r4"), Epoch(5, "other")):
        rig.router.send("g0", offer)
        assert rig.router.expect(EpochRefused) == EpochRefused(5, "r5")
    rig.router.send("g0", Epoch(6, "r6"))
    rig.router.forget()
    rig.router.expect(Holding)


def test_frames_of_a_router_that_is_not_obeyed_are_dropped(one_rig):
    rig = one_rig()
    rig.gen.set_router("127.0.0.1", rig.port)
    rig.router.expect(Register)
    rig.router.send("g0", Drain(5.0))
    time.sleep(0.1)
    assert rig.gen.poll_events() == []
    assert rig.gen.metrics.value("tailrace_stale_frames_total") == 1


def test_a_node_dials_again_and_tells_a_new_router_the_whole_set(one_rig):
    rig = one_rig()
    rig.follow(rig.ctx)
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16, chunk=16)
    rig.router.expect(Progress)
    rig.router.close()
    rig.router = Hub("router", "router-2")
    rig.port = rig.router.listen()
    rig.ctx.set_router("127.0.0.1", rig.port)
    register = rig.router.expect(Register)
    assert (register.epoch, register.router_boot) == (1, "router-1")
    rig.router.send("c0", Epoch(2, "router-2"))
    (held,) = rig.router.expect(Holding).requests
    assert (held.request, held.pages, held.needs, held.leg) == (KEY[0], 4, 16, "prefill")
    assert rig.router.expect(Progress).tokens_ready == 16
    finish(rig, 16, pages)


def test_heartbeats_carry_the_age_of_the_loops_stamp(one_rig):
    rig = one_rig()
    rig.follow(rig.gen)
    rig.gen.loop_stats.stamp = time.monotonic() - 9.0
    rig.gen.loop_stats.phase = "run"
    rig.router.forget()
    beat = rig.router.expect(Heartbeat)
    assert 8.5 < beat.stamp_age_s < 10 and beat.phase == "run" and beat.free_pages == PAGES - 1


def test_statistics_become_prometheus_text(one_rig):
    rig = one_rig()
    rig.follow(rig.gen)
    text = exposition([rig.router.expect(Stats)]).decode()
    assert 'tailrace_pages{model="",pool="kv",role="gen",state="free",worker="g0"} 16.0' in text


def test_a_drain_is_told_to_loop_and_router_and_refuses_new_work(one_rig):
    rig = one_rig()
    rig.follow(rig.ctx)
    rig.ctx.drain(7.0)
    assert event(rig.ctx, DrainAsked) == DrainAsked(7.0)
    assert rig.router.expect(Drain) == Drain(7.0)
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(8))
    assert rig.ingress.expect(Fail).code == "refused"


def test_a_boot_that_was_declared_dead_ends_its_process(one_rig, caplog, capfd):
    rig = one_rig()
    rig.follow(rig.gen)
    rig.router.send("g0", Deaths((rig.gen.config.boot,)))
    with pytest.raises(NodeFailed, match="declared dead"):
        until(lambda: rig.gen.poll_events() and False)
    rig.gen._thread.join(5)
    (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
    assert record.msg == "transfer_thread_failed" and not record.exc_info, "what is expected is told in one line"
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_of_the_transfer_thread_is_told_once_and_with_its_trace(one_rig, caplog):
    rig = one_rig()
    rig.gen._call(lambda: {}["a callback's own fault"])
    with pytest.raises(NodeFailed, match="callback"):
        until(lambda: rig.gen.poll_events() and False)
    rig.gen._thread.join(5)
    (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
    assert record.msg == "transfer_thread_failed" and record.exc_info[0] is KeyError


def test_what_a_dead_peers_pages_went_through_is_forgotten(one_rig):
    rig = one_rig()
    rig.follow(rig.gen)
    rig.pair()
    until(lambda: rig.ctx.config.boot in rig.gen._board._codecs)
    rig.router.send("g0", Deaths((rig.ctx.config.boot,)))
    until(lambda: rig.ctx.config.boot not in rig.gen._board._codecs)


def test_a_probe_that_fails_in_a_way_nobody_foresaw_costs_its_pair_some_time_and_nothing_else(
    one_rig, monkeypatch, caplog
):
    """A kernel that cannot be compiled, say: told with its trace, the transport passed over, tried again later."""
    rig = one_rig()
    probe, tries = ShmTransport.probe, []

    def failing(self: ShmTransport, boot: str) -> bool:
        tries.append(boot)
        if len(tries) == 1:
            raise RuntimeError("a kernel cannot be compiled")
        return probe(self, boot)

    monkeypatch.setattr(ShmTransport, "probe", failing)
    rig.follow(rig.ctx, rig.gen)
    rig.router.send("g0", Peers((rig.peer(rig.ctx),)))
    until(lambda: rig.gen.ready_pairs)
    assert len(tries) == 2
    (told,) = [record for record in caplog.records if record.message == "probe_failed"]
    assert told.exc_info and "cannot be compiled" in told.fields["reason"]
    (why,) = [record for record in caplog.records if record.message == "pair_not_made"]
    assert "cannot be compiled" in why.fields["reason"]


def test_a_fault_of_the_books_while_a_pair_is_made_ends_the_process(one_rig, monkeypatch):
    """It may have changed half of what it changes: nobody goes on with that."""
    rig = one_rig()

    def broken(self: Switchboard, boot: str, transport: object, compat: object) -> None:
        raise LedgerError("a page is free and held")

    monkeypatch.setattr(Switchboard, "pair_up", broken)
    rig.follow(rig.ctx, rig.gen)
    rig.router.send("g0", Peers((rig.peer(rig.ctx),)))
    with pytest.raises(NodeFailed, match="a page is free and held"):
        until(lambda: rig.gen.poll_events() and False)
    rig.ctx.poll_events()


# ------------------------------------------------------------------------------------------------------- life and death


def test_an_ingress_that_falls_silent_loses_its_requests(one_rig):
    rig = one_rig()
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", submit(8, leg="local", lease_s=0.2))
    event(rig.gen, Arrived)
    assert event(rig.gen, Cancelled).reason == "lease"
    assert rig.ingress.expect(Fail).code == "lost", "it may live all the same"


def test_who_renews_what_is_not_here_is_told(one_rig):
    """After all that was to be said of it: tokens that wait for their link come first."""
    rig = one_rig()
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", submit(8, leg="local"))
    event(rig.gen, Arrived)
    rig.ingress.send("g0", Renew((KEY, ("unknown", 1)), 5.0))
    fail = rig.ingress.expect(Fail)
    assert (fail.request, fail.attempt, fail.code, fail.retryable) == ("unknown", 1, NOT_HELD, True)
    rig.gen.tokens([Delta(*KEY, 0, 0, pack_ids((9,)), (), "length", None, (), 0, {})])
    rig.gen.ended(KEY, "finished")
    assert rig.ingress.expect(Tokens).deltas[0].finish == "length"
    until(lambda: rig.gen.idle)
    rig.ingress.send("g0", Renew((KEY,), 5.0))
    assert rig.ingress.expect(Fail).code == NOT_HELD


def test_a_taken_port_is_named(one_rig):
    rig = one_rig()
    with pytest.raises(NodeFailed, match=str(rig.gen.address[1])):
        rig.node("gen", "g1", port=rig.gen.address[1])


def test_a_transport_that_the_worker_lacks_is_refused(one_rig):
    rig = one_rig()
    with pytest.raises(ConfigError, match="nixl"):
        rig.node("gen", "g2", transport="nixl")


def test_a_stopped_node_leaves_no_thread(one_rig):
    before = threading.active_count()
    rig = one_rig("in_process")
    rig.close()
    until(lambda: threading.active_count() <= before)
    rig.nodes.clear()
    rig.arenas.clear()
    rig.router, rig.ingress = Hub("router", "x"), Hub("ingress", "y")


def test_a_lost_landing_notification_resets_the_pair_and_frees_the_chunk(one_rig):
    core = replace(CORE, kv_transfer_timeout_s=0.5)
    rig = one_rig("nixl", gen={"faults": True, "core": core}, ctx={"core": core})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.router.send("g0", SetFaults(json.dumps({"drop": {"landed": 1}})))
    event(rig.gen, FaultsSet)
    rig.ingress.dial(rig.ctx)
    rig.ingress.dial(rig.gen)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16)
    rig.bind(16)
    rig.router.expect(Bound)
    finish(rig, 16, pages)
    rig.ingress.send("g0", Renew((KEY,), 5.0))
    assert rig.ingress.expect(Fail).code == "timeout"
    until(lambda: rig.gen.kv.counts().used == 0 and rig.gen.idle)
    until(lambda: rig.gen.metrics.value("tailrace_landing_chunks", state="free") == 4)
    rig.ingress.send("c0", Cancel(*KEY, "client"))
    until(lambda: rig.gen.ready_pairs)
    second = ("b" * 32, 0)
    rig.ingress.send("c0", submit(16, key=second))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 16, key=second)
    rig.bind(16, seq=2, key=second)
    finish(rig, 16, pages, key=second)
    admitted = event(rig.gen, Admitted)
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(second, "finished")
