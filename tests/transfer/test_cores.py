"""Scenarios of the hand-off protocol, both cores and both page books together, in simulated time (handoff_sim)."""

import math
from dataclasses import replace

import pytest
from handoff_sim import CONFIG, NAMESPACE, PAGE, World, layout, prompt, row_layout

from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import ConfigError
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer import core_events as ce
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.loop_events import Admitted, Cancelled, FirstToken, PrefillResult
from tailrace.transfer.messages import (
    Bind,
    Cancel,
    Deaths,
    Drain,
    Expired,
    Fail,
    Handoff,
    NotNow,
    PageDescriptor,
    PeerAddress,
    Ready,
    Release,
    Renew,
    Submit,
    Valid,
    Want,
    pack_ids,
    unpack_ids,
)

STALE, EXPIRED, BYTES = ce.Metric.STALE_FRAMES, ce.Metric.EXPIRED_READS, ce.Metric.TRANSFER_BYTES
PAGE_BYTES = layout().bytes_per_page
BOTH = pytest.mark.parametrize("landing", [False, True], ids=["reading", "landing"])
LEASE = CONFIG.pin_lease_s + 2


def moved(gen):
    return gen.measures[BYTES] / 2  # logical and wire


def finished(*requests):
    assert [(r.name, r.outcome) for r in requests] == [(r.name, "finished") for r in requests]


# ------------------------------------------------------------------------------------------------------- the plain case


@BOTH
def test_a_prompt_prefilled_on_ctx_is_decoded_on_gen(landing):
    world = World(landing=landing)
    requests = [world.submit(f"r{n}", prompt(n, n)) for n in (1, PAGE - 1, PAGE, PAGE + 1, 8, 9, 40)]
    world.run(6)
    finished(*requests)
    assert all(r.firsts == 1 and r.attempt == 0 for r in requests)
    assert moved(world.workers["g0"]) == sum(-(-len(r.tokens) // PAGE) for r in requests) * PAGE_BYTES
    world.assert_quiet()


@BOTH
def test_what_is_left_to_gen_is_neither_computed_nor_moved_and_has_its_pages_from_the_start(landing):
    """Also where all is left, and one token is handed over all the same; ctx draws no token, not even of one."""
    world = World(landing=landing, layout=row_layout(), ctx_pages=80, gen_pages=120)
    plain = [world.submit(f"r{n}", prompt(n, n), left=7) for n in (1, 2, 7, 8, 9, 10, 11, 12, 15, 16, 40)]
    one = world.submit("one", prompt(50, 30), max_tokens=1, left=7)
    world.run(8)
    finished(*plain, one)
    assert all(r.firsts == 0 and r.attempt == 0 for r in (*plain, one)), "gen's first delta is its second word here"
    gen = world.workers["g0"]
    assert {a.handoff.request: a.handoff.num_tokens for a in gen.admitted} == {
        r.name: max(1, len(r.tokens) - 7) for r in (*plain, one)
    }
    assert all(a.handoff.first_tokens == () and a.handoff.left_to_gen == 7 for a in gen.admitted)
    pages = sum(row_layout().moved_pages(max(1, len(r.tokens) - 7)) for r in (*plain, one))
    assert moved(gen) == pages * row_layout().bytes_per_page
    world.assert_quiet()


def test_a_request_that_waits_for_a_gen_needs_pages_for_what_is_left_too():
    world = World(layout=row_layout())
    world.binding = False
    world.submit("r", prompt(0, 21), left=9)
    world.run(1)
    assert [held.needs for held in world.workers["c0"].core.holding()] == [21]
    world.binding = True
    world.run(3)
    (admitted,) = world.workers["g0"].admitted
    assert len(admitted.pages) == row_layout().num_pages(21) and admitted.moved.pages == row_layout().moved_pages(12)
    world.assert_quiet()


def test_a_record_of_other_tokens_than_were_bound_for_is_given_up():
    """Both sides reckon what is handed over; if they do not agree nothing is decoded."""
    world = World()
    request = world.submit("r", prompt(0, 21), left=9)
    request.left = 8  # the router says another number than the ingress did; the next attempt is about 8 everywhere
    world.run(4)
    finished(request)
    assert [(a.handoff.attempt, a.handoff.num_tokens) for a in world.workers["g0"].admitted] == [(1, 13)]
    world.assert_quiet()


def test_pages_are_announced_only_when_their_chunk_has_completed():
    """A10, A11: chunk of 6 tokens, page of 4, so that a page spans two chunks."""
    world = World()
    world.chunk_tokens = 6
    world.submit("r", prompt(0, 22))
    announced = []
    ctx = world.workers["c0"]
    send = world.send

    def watch(src, boot, frame):
        if isinstance(frame, Ready):
            computed = int(ctx.order[-1].split()[1]) if ctx.order else 0
            assert frame.tokens_ready <= computed
            for descriptor in frame.pages:
                whole = (descriptor.ordinal + 1) * PAGE
                assert whole <= computed or computed == 22
                announced.append(descriptor.ordinal)
        send(src, boot, frame)

    world.send = watch
    world.run(3)
    finished(*world.requests.values())
    assert announced == [0, 1, 2, 3, 4, 5], "each page once, in order"


def test_the_whole_set_says_when_it_does_not_know_how_long_a_prefill_takes():
    world = World()
    world.chunk_s = 0.5
    world.submit("r", prompt(0, 40))
    world.run(0.2)
    core = world.workers["c0"].core
    core.handle(ce.ChunkLaunched(("r", 0), False, math.inf), world.now)
    assert [held.seconds_left for held in core.holding()] == [None]
    core.handle(ce.ChunkLaunched(("r", 0), False, 1.5), world.now)
    assert [held.seconds_left for held in core.holding()] == [1.5]


def test_gen_reads_while_ctx_still_computes():
    world = World()
    world.chunk_s = 0.5
    world.submit("r", prompt(0, 40))
    world.run(2.2)
    assert world.requests["r"].firsts == 0
    assert moved(world.workers["g0"]) >= 4 * PAGE_BYTES
    world.run(3)
    finished(*world.requests.values())


def test_samples_share_one_transfer():
    world = World()
    request = world.submit("r", prompt(0, 17), samples=3)
    world.run(2)
    finished(request)
    assert request.firsts == 3
    gen = world.workers["g0"]
    assert moved(gen) == 5 * PAGE_BYTES
    assert [len(a.handoff.first_tokens) for a in gen.admitted] == [3]


@BOTH
def test_a_request_that_its_first_token_ends_needs_no_gen(landing):
    """A18, A19."""
    world = World(landing=landing)
    world.binding = False
    request = world.submit("r", prompt(0, 17), max_tokens=1)
    world.run(1)
    finished(request)
    assert not world.workers["g0"].admitted
    world.assert_quiet()


@BOTH
def test_a_gen_that_was_bound_in_vain_lets_go_at_once(landing):
    """A18: bound during prefill, then the first token ends the request."""
    world = World(landing=landing)
    world.chunk_s = 0.3
    request = world.submit("r", prompt(0, 17), max_tokens=1)
    world.run(0.5)
    assert world.workers["g0"].used > 0
    world.run(0.7)
    finished(request)
    world.assert_quiet()


# ------------------------------------------------------------------------------------------------- prefix hits (A5, A6)


@pytest.mark.parametrize("warm", [0, 1, 3, 4])
@pytest.mark.parametrize("length", [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
def test_exactly_the_pages_that_gen_lacks_are_moved(warm, length):
    world = World()
    tokens = tuple(range(100, 100 + length))
    if warm:
        finished_warm = world.submit("warm", tokens[: warm * PAGE])
        world.run(2)
        finished(finished_warm)
    gen = world.workers["g0"]
    before = moved(gen)
    request = world.submit("r", tokens)
    world.run(2)
    finished(request)
    shared = min(warm, length // PAGE)
    assert moved(gen) - before == (-(-length // PAGE) - shared) * PAGE_BYTES
    assert gen.admitted[-1].num_matched_tokens == shared * PAGE
    world.assert_quiet()


def test_a_full_hit_moves_nothing_and_ctx_still_gets_want_and_release():
    world = World()
    tokens = prompt(0, 4 * PAGE)
    world.submit("warm", tokens)
    world.run(2)
    world.frames.clear()
    world.submit("r", tokens)
    world.run(2)
    finished(*world.requests.values())
    sent = [f for src, _, f in world.frames if src.startswith("g")]
    assert [type(f) for f in sent] == [Want, Release]
    assert sent[0].ordinals == () and sent[1].seen == ()


def test_a_matched_page_cannot_be_evicted_between_bind_and_read():
    """A5, second part: gen's prefix is held from the match on."""
    world = World(gen_pages=12)
    warm = world.submit("warm", prompt(0, 4 * PAGE))
    world.run(2)
    world.held = True
    request = world.submit("r", prompt(0, 4 * PAGE - 1) + (1, 2, 3, 4, 5))
    world.run(1)
    gen = world.workers["g0"]
    kept = gen.kv.match_prefix(NAMESPACE, world.hasher.hash_blocks("s", warm.tokens), 12, whole=True)
    gen.kv.release(kept.pages)
    rest = gen.kv.allocate(gen.kv.available())
    assert rest is not None and not set(rest) & set(kept.pages)
    gen.kv.release(rest)
    world.held = False
    world.run(2)
    finished(warm, request)


# -------------------------------------------------------------------------------------------- abort, early free (A1, B)


@BOTH
def test_aborted_pages_are_not_given_out_while_a_copy_may_write_them(landing):
    """A1: abort under a held transfer, then a request that needs more than half of the pool."""
    world = World(gen_pages=10, landing=landing)
    gen = world.workers["g0"]
    if landing:
        world.read_s = 0.4  # the unpack is what is under way
    else:
        world.held = True
    a = world.submit("a", prompt(1, 6 * PAGE))
    world.run(0.9 if landing else 0.5)
    world.cancel("a")
    world.run(0.02)
    busy = gen.kv.counts().quarantined
    assert busy > 0
    b = world.submit("b", prompt(2, 7 * PAGE))
    world.run(0.2)
    assert landing or gen.kv.counts().quarantined == busy
    assert not gen.admitted
    world.held = False
    world.run(4)
    finished(b)
    assert a.outcome == "cancelled"
    world.assert_quiet()


@BOTH
@pytest.mark.parametrize("step", range(0, 48, 3))
def test_an_abort_at_any_moment_leaves_nothing(landing, step):
    """B7: cancel in every state, two requests sharing a prefix so that pins and holds overlap."""
    world = World(landing=landing)
    world.chunk_s = 0.04
    world.submit("r", prompt(0, 21, 1))
    world.submit("other", prompt(0, 21, 2))
    world.run(step / 50)
    world.cancel("r")
    world.run(LEASE)
    finished(world.requests["other"])
    world.assert_quiet()


def test_a_cancel_that_overtakes_its_submit_is_remembered():
    core = CtxCore(KvManager(layout(), 9, PAGE), CONFIG)
    assert core.handle(ce.FromIngress(Cancel("r", 0, "client")), 0.0) == []
    assert not any(isinstance(a, ce.ToLoop) for a in core.handle(ce.FromIngress(submit("r")), 0.1))
    assert core.idle


def test_a_cancel_that_overtakes_its_bind_is_remembered():
    core, _ = gen_core()
    core.handle(ce.FromIngress(Cancel("r", 0, "client")), 0.0)
    (answer,) = core.handle(ce.FromRouter(bind("r", 9)), 0.1)
    assert isinstance(answer.frame, NotNow) and answer.frame.why == "cancelled"


def test_a_want_that_overtakes_its_submit_is_answered_after_it():
    core = CtxCore(KvManager(layout(), 9, PAGE), CONFIG)
    assert core.handle(ce.FromPeer("g", want("r", 2)), 0.0) == []
    actions = core.handle(ce.FromIngress(submit("r")), 0.1)
    assert any(isinstance(a, ce.ToPeer) and isinstance(a.frame, Ready) for a in actions)
    assert core.holding()[0].needs == 0


# ------------------------------------------------------------------------------------------------------- pins (A4, A14)


def test_a_prompt_that_is_being_sent_keeps_its_pages_when_another_needs_room():
    """A4: ctx's pool just above one prompt."""
    world = World(ctx_pages=8)
    world.held = True
    a = world.submit("a", prompt(1, 7 * PAGE))
    world.run(0.8)
    b = world.submit("b", prompt(2, 7 * PAGE))
    world.run(1.0)
    ctx = world.workers["c0"]
    assert ctx.kv.counts().pinned == 7 and a.outcome is None
    world.held = False
    world.run(3)
    finished(a, b)
    world.assert_quiet()


def test_a_reader_that_comes_after_its_lease_never_decodes_reused_pages():
    """A14: lease 1 s, the pull and its renewals held for 3 s while ctx serves other prompts; POISON on."""
    world = World(ctx_pages=10, config=replace(CONFIG, pin_lease_s=1.0, kv_transfer_timeout_s=30.0))
    world.held = True
    a = world.submit("a", prompt(1, 6 * PAGE))
    world.run(0.5)
    world.faults["want"] = ["drop"] * 50
    world.run(1.2)
    assert world.workers["c0"].kv.counts().pinned == 0
    others = [world.submit(f"b{i}", prompt(2 + i, 9 * PAGE), max_tokens=1) for i in range(2)]
    world.run(1.5)
    finished(*others)
    world.held = False
    world.faults["want"] = []
    world.run(3)
    finished(a)
    assert a.attempt == 1 and a.reason == "length"
    assert world.workers["g0"].measures[EXPIRED] == 1
    assert len(world.workers["g0"].admitted) == 1
    world.assert_quiet()


def test_a_late_release_is_valid_if_no_generation_changed():
    world = World(config=replace(CONFIG, pin_lease_s=1.0, kv_transfer_timeout_s=30.0))
    world.held = True
    a = world.submit("a", prompt(1, 6 * PAGE))
    world.run(0.6)
    world.faults["want"] = ["drop"] * 50
    world.run(1.5)
    assert world.workers["c0"].used == 0
    world.held = False
    world.run(1)
    finished(a)
    assert a.attempt == 0
    assert world.workers["g0"].measures[EXPIRED] == 0


def test_release_is_expired_if_one_named_generation_changed():
    kv = KvManager(layout(), 9, PAGE)
    core = CtxCore(kv, CONFIG)
    pages = prefilled(core, kv, "r", 8)
    core.handle(ce.FromPeer("g", want("r", 2)), 0.2)
    told = [(0, o, kv.descriptor_generation(p)) for o, p in enumerate(pages)]
    wrong = (told[0], (0, 1, told[1][2] + 1))
    (answer,) = core.handle(ce.FromPeer("g", Release("r", 0, wrong)), 0.3)
    assert isinstance(answer.frame, Expired)
    assert kv.counts().pinned == 0


def test_release_is_not_valid_for_a_gen_that_is_no_longer_the_reader():
    kv = KvManager(layout(), 9, PAGE)
    core = CtxCore(kv, CONFIG)
    pages = prefilled(core, kv, "r", 8)
    seen = tuple((0, o, kv.descriptor_generation(p)) for o, p in enumerate(pages))
    core.handle(ce.FromPeer("slow", want("r", 2)), 0.2)
    core.handle(ce.FromPeer("second", want("r", 2)), 0.3)
    late = core.handle(ce.FromPeer("slow", Release("r", 0, seen)), 0.4)
    assert [a.frame for a in late if isinstance(a, ce.ToPeer)] == [Expired("r", 0, "reader")]
    (answer,) = core.handle(ce.FromPeer("second", Release("r", 0, seen)), 0.5)
    assert answer.frame == Valid("r", 0)


def test_a_repeated_release_gets_the_same_answer():
    kv = KvManager(layout(), 9, PAGE)
    core = CtxCore(kv, CONFIG)
    pages = prefilled(core, kv, "r", 8)
    seen = tuple((0, o, kv.descriptor_generation(p)) for o, p in enumerate(pages))
    core.handle(ce.FromPeer("g", want("r", 2)), 0.2)
    core.handle(ce.FromPeer("g", Release("r", 0, seen)), 0.3)
    kv.drop_cache()
    kv.allocate(8)
    again = core.handle(ce.FromPeer("g", Release("r", 0, seen)), 0.4)
    assert ce.ToPeer("g", Valid("r", 0)) in again, "it was valid when gen had read everything"
    assert ce.Measure(STALE) in again


# -------------------------------------------------------------------------------------------- leases, silence (B2 - B8)


def test_a_full_ctx_pool_frees_itself_when_its_readers_are_silent():
    """B2: nothing is scheduled, nothing arrives; only the tick runs."""
    world = World(ctx_pages=12, num_gen=1)
    world.held = True
    stuck = [world.submit(f"s{i}", prompt(i, 6 * PAGE)) for i in range(2)]
    world.run(1.0)
    ctx = world.workers["c0"]
    assert ctx.kv.counts().pinned == 12
    world.faults["want"] = ["drop"] * 500  # the gen is stopped
    late = world.submit("late", prompt(9, 6 * PAGE), max_tokens=1)
    world.run(1.0)
    assert late.outcome is None
    world.run(CONFIG.pin_lease_s + 1)
    finished(late)
    assert all(r.outcome != "finished" for r in stuck)


def test_pages_are_free_right_after_a_late_completion_with_no_new_traffic():
    """B3: the release comes 1 s late, then total silence."""
    world = World()
    world.faults["release"] = ["late"]
    world.submit("r", prompt(0, 17))
    world.run(0.8)
    ctx = world.workers["c0"]
    assert ctx.kv.counts().pinned == 5
    world.run(0.6)
    assert ctx.used == 0


@BOTH
def test_an_aborted_receive_returns_its_pages_when_ctx_is_killed(landing):
    """B4: HOLD, abort at gen, KILL ctx; the hold is never lifted."""
    world = World(landing=landing)
    world.held = True
    world.submit("r", prompt(0, 17))
    world.run(0.5)
    gen = world.workers["g0"]
    world.cancel("r")
    world.run(0.1)
    assert gen.kv.counts().quarantined == (0 if landing else 5)
    world.kill("c0")
    world.run(2.0)
    assert gen.used == 0 and not gen.chunks
    assert gen.closed == ["c0.1"]
    world.assert_quiet()


@BOTH
def test_ctx_frees_the_pages_of_a_killed_gen_by_lease_alone(landing):
    """B8, first run: 8 pulls pending, no death notice."""
    world = World(ctx_pages=40, gen_pages=40, landing=landing)
    world.announce_deaths = False
    world.held = True
    for i in range(8):
        world.submit(f"r{i}", prompt(i, 4 * PAGE))
    world.run(2)
    ctx = world.workers["c0"]
    assert ctx.used > 0
    world.kill("g0")
    world.held = False
    world.run(LEASE)
    assert ctx.used == 0


def test_nothing_expires_while_gen_lives_however_slow_it_is():
    """B8, second run: a queue three leases long."""
    world = World(config=replace(CONFIG, pin_lease_s=1.0, kv_transfer_timeout_s=30.0))
    world.read_s = 3.5
    requests = [world.submit(f"r{i}", prompt(i, 4 * PAGE)) for i in range(3)]
    world.run(9)
    finished(*requests)
    assert all(r.attempt == 0 for r in requests)


@BOTH
def test_a_silent_ingress_ends_its_requests_everywhere(landing):
    world = World(landing=landing)
    world.decode_s = 100.0
    world.chunk_s = 0.5
    for i in range(3):
        world.submit(f"r{i}", prompt(i, 24))
    world.run(3)
    world.renewing = False
    world.run(CONFIG.request_lease_s + 2)
    world.assert_quiet()


def test_a_deadline_is_told_and_ends_the_work():
    core = CtxCore(KvManager(layout(), 9, PAGE), CONFIG)
    core.handle(ce.FromIngress(replace(submit("r"), timeout_s=1.0)), 0.0)
    core.handle(ce.FromIngress(Renew((("r", 0),), 5.0)), 0.5)
    actions = core.handle(ce.Tick(), 1.0)
    assert [a.item.code for a in actions if isinstance(a, ce.ToIngress)] == ["timeout"]
    assert [a.event for a in actions if isinstance(a, ce.ToLoop)] == [Cancelled(("r", 0), "timeout")]
    core.handle(ce.LoopEnded(("r", 0), "cancelled"), 1.1)
    assert core.idle


# --------------------------------------------------------------------------------------------------- lost frames, links


@BOTH
@pytest.mark.parametrize("kind", ["ready", "handoff", "release", "want"])
def test_a_lost_frame_costs_one_renewal(landing, kind):
    world = World(landing=landing)
    world.faults[kind] = ["drop"]
    request = world.submit("r", prompt(0, 17))
    world.run(CONFIG.renew_every_s * 2 + 1)
    finished(request)
    assert request.attempt == 0
    world.assert_quiet()


@BOTH
@pytest.mark.parametrize("kind", ["ready", "handoff", "release", "want", "landed"])
@pytest.mark.parametrize("fault", ["dup", "late"])
def test_doubled_and_late_frames_change_nothing(landing, kind, fault):
    world = World(landing=landing)
    world.faults[kind] = [fault] * 20
    requests = [world.submit(f"r{i}", prompt(0, 17, i)) for i in range(3)]
    world.run(9)
    finished(*requests)
    assert all(r.attempt == 0 for r in requests)
    world.assert_quiet()


def test_doubled_frames_are_counted():
    world = World()
    for kind in ("ready", "handoff", "release"):
        world.faults[kind] = ["dup"] * 9
    world.submit("r", prompt(0, 17))
    world.run(3)
    assert sum(w.measures[STALE] for w in world.workers.values()) >= 3


def test_a_lost_landing_notification_ends_in_another_attempt_and_frees_the_chunk():
    world = World(landing=True)
    world.faults["landed"] = ["drop"]
    request = world.submit("r", prompt(0, 17))
    world.run(CONFIG.kv_transfer_timeout_s * 2 + 3)
    finished(request)
    assert request.attempt == 1
    world.assert_quiet()


@BOTH
def test_a_broken_link_is_no_death(landing):
    world = World(landing=landing)
    world.read_s = 0.2
    request = world.submit("r", prompt(0, 17))
    world.run(0.3)
    world.break_link("c0.1", world.workers["g0"], 1.0)
    world.run(4)
    finished(request)
    assert request.attempt == 0
    world.assert_quiet()


@BOTH
def test_another_gen_reads_the_same_pages_when_the_first_dies(landing):
    """A gen that dies before release costs no prefill."""
    world = World(landing=landing, num_gen=2)
    world.read_s = 0.5
    request = world.submit("r", prompt(0, 17))
    world.run(0.4)
    bound = next(w for w in world.workers.values() if w.boot == request.gen)
    world.kill(bound.name)
    world.run(5)
    finished(request)
    assert request.attempt == 0
    assert [o for o in world.workers["c0"].order if o == "computed 17"] == ["computed 17"]
    world.assert_quiet()


def test_what_a_dead_ctx_has_announced_is_still_read_on_its_host():
    world = World()
    world.read_s = 1.5
    request = world.submit("r", prompt(0, 17))
    world.run(0.5)
    world.kill("c0")
    world.run(3)
    finished(request)
    assert request.attempt == 0
    assert world.workers["g0"].closed == ["c0.1"]
    world.assert_quiet()


@pytest.mark.parametrize("when", [0.05, 0.12, 0.5])
@BOTH
def test_a_ctx_that_dies_is_replaced_by_another(landing, when):
    world = World(landing=landing, num_ctx=2)
    world.read_s = 0.3
    request = world.submit("r", prompt(0, 17))
    world.run(when)
    world.kill(next(w.name for w in world.workers.values() if w.boot == request.ctx))
    world.run(LEASE)
    finished(request)
    world.assert_quiet()


def test_generation_numbers_of_a_dead_ctx_that_changed_are_not_valid():
    core, kv = gen_core(still_valid=False)
    hand_all_over(core, kv, "r", 8, release=False)
    actions = core.handle(ce.FromRouter(Deaths(("c",))), 0.5)
    actions += core.handle(read_done(core, "r", 8), 0.6)
    assert [a.item.code for a in actions if isinstance(a, ce.ToIngress)] == ["expired"]
    assert kv.counts().used == 0


# ---------------------------------------------------------------------------------------------------- failures are told


@BOTH
def test_a_failed_read_is_recomputed(landing):
    """A23, A24."""
    world = World(landing=landing)
    world.read_errors = ["fault"]
    request = world.submit("r", prompt(0, 17))
    world.run(3)
    finished(request)
    assert request.attempt == 1 and len(world.workers["g0"].admitted) == 1
    world.assert_quiet()


def test_a_failed_read_ends_the_request_if_the_policy_says_so():
    world = World(config=replace(CONFIG, retry_failed_transfers=False))
    world.read_errors = ["fault"]
    request = world.submit("r", prompt(0, 17))
    world.run(3)
    assert (request.outcome, request.reason) == ("failed", "transfer")
    assert not world.workers["g0"].admitted
    world.assert_quiet()


def test_a_write_that_could_not_be_posted_is_told_at_once():
    """B18."""
    world = World(landing=True)
    world.post_errors = ["fault"]
    request = world.submit("r", prompt(0, 17))
    world.run(1.0)
    assert request.attempt == 1
    world.run(2)
    finished(request)
    world.assert_quiet()


def test_a_reader_that_was_told_of_a_failed_write_does_not_come_back_by_a_late_renewal():
    world = World(landing=True, config=replace(CONFIG, pin_lease_s=1.0))
    world.chunk_tokens, world.read_s = 6, 0.3  # one write fails while another is under way, and gen renews just then
    world.post_errors = ["fault"]
    request = world.submit("r", prompt(0, 9))
    world.run(6)
    finished(request)
    assert request.attempt == 1
    world.assert_quiet()


def test_a_write_that_was_lost_ends_the_pair_before_its_chunk_is_granted_again():
    world = World(landing=True)
    world.post_errors = ["lost"]
    request = world.submit("r", prompt(0, 17))
    world.run(4.0)
    finished(request)
    assert request.attempt == 1
    assert world.workers["g0"].resets == ["c0.1"]
    world.assert_quiet()


def test_a_handoff_about_another_length_is_refused():
    """A3: a record for 0 tokens, or for others than were bound."""
    core, kv = gen_core()
    core.handle(ce.FromRouter(bind("r", 9)), 0.0)
    actions = core.handle(ce.FromPeer("c", handoff("r", 0)), 0.1)
    assert [a.item.code for a in actions if isinstance(a, ce.ToIngress)] == ["internal"]
    assert kv.counts().used == 0


def test_a_stalled_ctx_gives_up_its_landing_chunks_by_a_reset_of_the_pair():
    world = World(landing=True)
    world.held = True
    request = world.submit("r", prompt(0, 17))
    world.run(0.5)
    gen = world.workers["g0"]
    assert gen.chunks
    world.workers["c0"].alive = False  # stopped, not dead: no notice, no frames
    world.run(CONFIG.kv_transfer_timeout_s * 2 + 1)
    assert gen.resets == ["c0.1"]
    assert not gen.chunks and gen.used == 0
    assert request.outcome != "finished"


def test_a_transfer_without_progress_is_given_up_and_frees_no_buffer_early():
    world = World(config=replace(CONFIG, kv_transfer_timeout_s=1.0))
    world.held = True
    world.retries = 1
    request = world.submit("r", prompt(0, 17))
    world.run(2.5)
    gen = world.workers["g0"]
    assert (request.outcome, request.reason) == ("failed", "timeout")
    assert gen.kv.counts().quarantined == 5
    world.held = False
    world.run(0.2)
    world.assert_quiet()


def test_a_long_chunk_is_no_stalled_transfer():
    world = World(config=replace(CONFIG, kv_transfer_timeout_s=1.0))
    world.chunk_s = 4.0
    request = world.submit("r", prompt(0, 17))
    world.run(20)
    finished(request)
    assert request.attempt == 0


# --------------------------------------------------------------------------------------------------------- reservations


def test_pages_are_reserved_all_or_not_at_all():
    core, kv = gen_core(pages=8)
    taken = kv.allocate(5)
    (answer,) = core.handle(ce.FromRouter(bind("r", 4 * PAGE)), 0.0)
    assert isinstance(answer.frame, NotNow) and (answer.frame.needed, answer.frame.free) == (4, 3)
    assert kv.counts().held == 5 and core.idle
    kv.release(taken)


def test_headroom_is_kept_for_what_runs():
    core, kv = gen_core(pages=8, headroom=3)
    (answer,) = core.handle(ce.FromRouter(bind("r", 6 * PAGE)), 0.0)
    assert answer.frame.why == "headroom"
    actions = core.handle(ce.FromRouter(bind("r", 5 * PAGE)), 0.1)
    assert kv.counts().held == 5 and len(actions) == 2


def test_a_bind_to_an_unpaired_ctx_is_refused_not_forgotten():
    core, _ = gen_core(paired=False)
    (answer,) = core.handle(ce.FromRouter(bind("r", 8)), 0.0)
    assert answer.frame.why == "pair"


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has():
    core, kv = gen_core()
    core.handle(ce.FromRouter(bind("a", 8)), 0.0)
    core.handle(ce.FromRouter(Drain(30.0)), 0.1)
    (answer,) = core.handle(ce.FromRouter(bind("b", 8)), 0.2)
    assert answer.frame.why == "draining"
    refused = core.handle(ce.FromIngress(replace(submit("c"), leg="local")), 0.3)
    assert refused[0].item.code == "refused" and refused[0].item.retryable
    assert ("a", 0) in core


def test_pages_before_a_window_are_neither_reserved_nor_moved():
    group = StateGroup(GroupKind.WINDOW, (0,), (Field("k", 1, 2),), window=6)
    kv = KvManager(replace(layout(), group=group), 9, PAGE)
    core, kv = gen_core(kv=kv)
    actions = core.handle(ce.FromRouter(bind("r", 5 * PAGE)), 0.0)
    want_frame = actions[1].frame
    first = kv.layout.first_needed_page(5 * PAGE)
    assert first == 3 and want_frame.ordinals == ((0, 3, 5),)
    assert kv.counts().held == 2


# --------------------------------------------------------------------------------------------------- the record, memory


def test_only_the_tail_of_the_prompt_travels_with_its_counts():
    kv = KvManager(layout(), 400, PAGE)
    core = CtxCore(kv, replace(CONFIG, prompt_tail_tokens=256))
    params = SamplingParams(max_tokens=4, repetition_penalty=1.2)
    ids = tuple(i % 50 for i in range(600))
    long = replace(submit("r"), prompt_ids=pack_ids(ids), params=params)
    actions = prefill(core, kv, long, 600, reader="g")
    record = next(a.frame for a in actions if isinstance(a, ce.ToPeer) and isinstance(a.frame, Handoff))
    assert unpack_ids(record.tail_ids) == list(ids[-256:])
    assert record.num_prompt_tokens == 600 and record.counts[49] == 12
    plain = replace(long, request="p", params=SamplingParams(max_tokens=4))
    actions = prefill(core, kv, plain, 600, reader="g")
    record = next(a.frame for a in actions if isinstance(a, ce.ToPeer) and isinstance(a.frame, Handoff))
    assert record.counts == {}


@pytest.mark.parametrize(("tail", "block"), [(255, 64), (0, 64), (256, 512)])
def test_a_prompt_tail_shorter_than_allowed_is_refused(tail, block):
    with pytest.raises(ConfigError, match=str(tail)):
        CtxCore(KvManager(layout(), 9, block), replace(CONFIG, prompt_tail_tokens=tail))


def test_a_later_attempt_continues_where_the_former_ended():
    kv = KvManager(layout(), 20, PAGE)
    core = CtxCore(kv, CONFIG)
    second = replace(submit("r"), attempt=1, output_ids=pack_ids((5, 6, 7)))
    actions = prefill(core, kv, second, 11, reader=None)
    (first,) = [a.item for a in actions if isinstance(a, ce.ToIngress)]
    assert first.start == 3


def test_progress_goes_to_the_router_until_a_gen_is_bound_and_again_when_it_is_lost():
    kv = KvManager(layout(), 20, PAGE)
    core = CtxCore(kv, CONFIG)
    core.handle(ce.FromIngress(submit("r")), 0.0)
    assert progress(core.handle(ce.ChunkLaunched(("r", 0), False, 0.5), 0.1)) == [(0, False)]
    core.handle(ce.FromPeer("g", want("r", 2)), 0.2)
    assert progress(core.handle(ce.ChunkLaunched(("r", 0), True, 0.2), 0.3)) == []
    assert progress(core.handle(ce.FromRouter(Deaths(("g",))), 0.4)) == [(0, True)]
    assert progress(core.handle(ce.RouterUp("router"), 0.5)) == [(0, True)]


def test_memory_of_ended_requests_is_bounded():
    world = World(config=replace(CONFIG, remember=4))
    for i in range(30):
        world.submit(f"r{i}", prompt(i, 9))
        world.run(0.5)
    world.run(1)
    finished(*world.requests.values())
    for worker in world.workers.values():
        assert len(worker.core._recent) <= 4
    world.assert_quiet()


def test_frames_of_unknown_requests_are_counted_and_dropped():
    core, kv = gen_core()
    for frame in (Valid("x", 0), Expired("x", 0, "?"), Ready("x", 0, (), 4, False), handoff("x", 4)):
        assert core.handle(ce.FromPeer("c", frame), 0.0) == [ce.Measure(STALE)]
    assert core.idle and kv.counts().used == 0


# -------------------------------------------------------------------------------------------------------------- helpers


class Wire:
    def __init__(self, still_valid):
        self.answer = still_valid

    def grants(self, key, boot, n):
        return ()

    def reclaim(self, key, boot):
        pass

    def still_valid(self, boot, seen):
        return self.answer


def gen_core(*, pages=16, headroom=0, paired=True, still_valid=True, kv=None):
    kv = kv or KvManager(layout(), pages + 1, PAGE)
    core = GenCore(kv, Wire(still_valid), CONFIG, lambda: headroom)
    if paired:
        core.handle(ce.PairUp("c", "shm", False, True), 0.0)
    return core, kv


def submit(request):
    ids = pack_ids(tuple(range(8)))
    return Submit(request, 0, "prefill", ids, b"", SamplingParams(max_tokens=4), 1, b"", NAMESPACE, 0, 9.0, None, False)


def bind(request, num_tokens):
    return Bind(1, request, 0, PeerAddress("c", "c", "h", 1), num_tokens, 8, 1, b"", NAMESPACE)


def want(request, num_pages):
    return Want(request, 0, "shm", ((0, 0, num_pages),), (), True)


def handoff(request, num_tokens):
    return Handoff(
        request, 0, num_tokens, num_tokens, (1,), (False,), b"", {}, b"", b"", NAMESPACE, SamplingParams(max_tokens=4),
        1, 0, 9.0,
    )  # fmt: skip


def prefill(core, kv, frame, num_tokens, reader):
    """Run a whole prefill through a ctx core; returns the last actions."""
    key = (frame.request, frame.attempt)
    core.handle(ce.FromIngress(frame), 0.0)
    core.handle(ce.ChunkLaunched(key, True, 0.1), 0.0)
    pages = kv.allocate(-(-num_tokens // PAGE))
    kv.pin(pages)
    core.handle(ce.ChunkDone(key, tuple(enumerate(pages)), num_tokens, 0.0), 0.1)
    if reader is not None:
        core.handle(ce.FromPeer(reader, replace(want(frame.request, len(pages)), attempt=frame.attempt)), 0.1)
    actions = core.handle(ce.PrefillDone(key, PrefillResult((FirstToken(3),), num_tokens)), 0.1)
    kv.release(pages)
    return actions


def prefilled(core, kv, request, num_tokens):
    before = set(range(1, 9))
    prefill(core, kv, submit(request), num_tokens, reader=None)
    return sorted(p for p in before if kv.counts().pinned and p <= -(-num_tokens // PAGE))


def read_done(core, request, num_tokens):
    from tailrace.transfer.transports.base import ReadDone

    units = tuple(PageDescriptor(0, o, o + 1, 1) for o in range(num_tokens // PAGE))
    return ReadDone(1, (request, 0), units)


def hand_all_over(core, kv, request, num_tokens, *, release):
    core.handle(ce.FromRouter(bind(request, num_tokens)), 0.0)
    units = tuple(PageDescriptor(0, o, o + 1, 1) for o in range(num_tokens // PAGE))
    core.handle(ce.FromPeer("c", Ready(request, 0, units, num_tokens, True)), 0.1)
    core.handle(ce.FromPeer("c", handoff(request, num_tokens)), 0.2)
    if release:
        core.handle(read_done(core, request, num_tokens), 0.3)


def progress(actions):
    return [(a.frame.tokens_ready, a.frame.last_launched) for a in actions if isinstance(a, ce.ToRouter)]


def test_a_gen_that_has_all_admits_only_after_valid():
    core, kv = gen_core()
    hand_all_over(core, kv, "r", 8, release=True)
    assert not core.handle(ce.Tick(), 0.4)
    actions = core.handle(ce.FromPeer("c", Valid("r", 0)), 0.5)
    (admitted,) = [a.event for a in actions if isinstance(a, ce.ToLoop)]
    assert isinstance(admitted, Admitted) and len(admitted.pages) == 2
    assert core.handle(ce.FromPeer("c", Valid("r", 0)), 0.6) == [ce.Measure(STALE)]
    assert kv.counts().held == 2, "the hold has passed to the loop"
    assert core.handle(ce.FromPeer("c", Fail("r", 0, "ended", "", False)), 0.7) == [ce.Measure(STALE)]
