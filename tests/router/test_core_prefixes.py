"""Placement by what workers have cached, and by conversations: who holds a prefix, who is spared, who is left out."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from router_scene import COMPAT, Scene

from tailrace.model.errors import ProtocolError
from tailrace.transfer.messages import CacheEvent, CacheQuery, Register

BLOCK = COMPAT.block_tokens
NS, OTHER = b"n", b"o"


def blocks(seed, count):
    return random.Random(seed).randbytes(16 * count)


class Warm(Scene):
    """A scene whose workers tell what they have cached."""

    def __init__(self, **settings):
        super().__init__(**{"max_backlog_s": 1000.0} | settings)
        self.numbers = Counter()
        self.core.placer.prospects.given_ahead_s = lambda worker: 1000.0  # nobody waits in the router

    def holds(self, boot, packed, *, namespace=NS, removed=b""):
        """The worker says so; its first word is its whole set."""
        first = not self.numbers[boot]
        self.numbers[boot] += 1
        stored = ((namespace, packed),) if packed else ()
        gone = ((namespace, removed),) if removed else ()
        self.say(boot, CacheEvent(self.registers[boot].worker, boot, self.numbers[boot], first, stored, gone))

    def turn(self, packed, *, more=10, max_new=1, **fields):
        """A request whose full blocks are `packed`; the boot id that it was placed on, and its key."""
        key = self.place(tokens=len(packed) // 16 * BLOCK + more, max_new=max_new, hashes=packed, **fields)
        (placed,) = self.placed(fields.get("ingress", "ingress-1"))
        return placed.boot, key


@pytest.mark.parametrize("placement", ["prefix", "least_prefill"])
def test_a_prompt_goes_where_its_prefix_is_and_claims_only_the_rest(placement):
    scene = Warm(placement=placement)
    ctxs, _ = scene.cluster(4, 1, total=10_000)
    prompt = blocks("a", 10)
    scene.holds(ctxs[2], prompt[: 16 * 8])
    at, key = scene.turn(prompt)
    assert at == ctxs[2] and scene.state.prefill.amount(key) == 2 * BLOCK + 10
    assert scene.state.counters["predicted_hit_tokens"] == 8 * BLOCK
    scene.done(key)
    scene.assert_quiet()


def test_of_several_holders_the_least_loaded_of_those_with_the_longest_prefix_is_taken():
    scene = Warm(placement="prefix")
    ctxs, _ = scene.cluster(4, 1, total=10_000)
    prompt = blocks("a", 10)
    for i, count in enumerate((2, 10, 10, 4)):
        scene.holds(ctxs[i], prompt[: 16 * count])
    assert {scene.turn(prompt)[0], scene.turn(prompt)[0]} == {ctxs[1], ctxs[2]}


@pytest.mark.parametrize("placement", ["prefix", "least_prefill"])
def test_c1_nobody_drowns_for_a_prefix_nor_for_a_small_cache(placement):
    scene = Warm(placement=placement)
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    scene.holds(b, blocks("old", 100))
    busy = Counter(scene.turn(blocks(i, 30), ingress="ingress-2")[0] for i in range(8))
    assert set(busy.values()) == {4}
    loaded = scene.place(tokens=50_000, max_new=1, ingress="ingress-2")
    (drowning,) = [p.boot for p in scene.placed("ingress-2")]
    other = b if drowning == a else a
    scene.holds(drowning, blocks("common", 2))
    short = [scene.turn(blocks("common", 2))[0] for _ in range(20)]
    assert short.count(other) == 20  # 128 cached tokens are not worth 50,000 others
    assert loaded in scene.state.records


def test_a_holder_is_left_as_soon_as_its_wait_exceeds_what_the_prefix_would_cost():
    scene = Warm(placement="prefix")
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    prompt = blocks("p", 20)
    scene.holds(a, prompt)
    at = [scene.turn(prompt + blocks(i, 2))[0] for i in range(12)]
    first_away = at.index(b)
    assert at[:first_away] == [a] * first_away and first_away >= 5
    assert first_away * (2 * BLOCK + 10) > 20 * BLOCK - 3 * BLOCK  # not before it was worth it


@pytest.mark.parametrize("placement", ["prefix", "least_prefill"])
def test_c9_a_burst_of_unknown_prompts_spreads(placement):
    scene = Warm(placement=placement)
    ctxs, _ = scene.cluster(4, 4, total=10_000)
    share = Counter(scene.turn(blocks(i, 2))[0] for i in range(64))
    assert set(share) == set(ctxs) and max(share.values()) <= 1.3 * 16


def test_where_all_are_busy_a_burst_of_one_new_prompt_meets_where_its_first_one_is_computed():
    scene = Warm(placement="prefix")
    scene.cluster(4, 4, total=10_000)
    for i in range(8):
        scene.turn(blocks(f"busy {i}", 30))
    prompt = blocks("new", 40)
    assert len({scene.turn(prompt + blocks(i, 1))[0] for i in range(6)}) == 1


def test_where_all_are_busy_a_holder_is_still_left_in_the_end():
    scene = Warm(placement="prefix")
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    scene.holds(a, blocks("p", 4))
    for i in range(6):
        scene.turn(blocks(f"busy {i}", 10))
    at = [scene.turn(blocks("p", 4) + blocks(i, 4))[0] for i in range(120)]
    assert at[0] == a and at.index(b) < 60 and at.count(b) > 20


def test_what_a_request_would_have_brought_is_forgotten_with_it():
    scene = Warm(placement="prefix")
    scene.cluster(2, 1, total=10_000)
    _, key = scene.turn(blocks("x", 9))
    assert len(scene.state.blocks) == 9
    scene.done(key, "cancelled")
    assert len(scene.state.blocks) == 0
    scene.assert_quiet()


def test_c5_a_dead_worker_is_never_chosen_for_its_prefix_and_its_entries_are_dropped():
    scene = Warm(placement="prefix")
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    prompt = blocks("p", 50)
    scene.holds(a, prompt)
    assert scene.turn(prompt)[0] == a
    scene.core.declare_dead(a, "killed")
    scene.pump()
    assert {scene.turn(prompt)[0] for _ in range(20)} == {b}
    assert scene.state.blocks.mask(a) == 0 and set(scene.state.cached_tokens(_place(prompt))) == {b}


def test_c5_a_worker_whose_link_is_lost_is_passed_over_and_keeps_its_entries_until_it_is_dead():
    scene = Warm(placement="prefix")
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    prompt = blocks("p", 50)
    scene.holds(a, prompt)
    scene.down(a)
    assert scene.turn(prompt)[0] == b and scene.state.blocks.num_held(a) == 50
    scene.wait(3.0)
    assert scene.state.blocks.num_held(a) == 0


def test_c4_a_worker_that_has_just_come_is_not_flooded_for_being_empty():
    scene = Warm(placement="prefix")
    ctxs, _ = scene.cluster(3, 1, total=10_000)
    for i, ctx in enumerate(ctxs):
        scene.holds(ctx, blocks(f"old {i}", 100))
    scene.core.declare_dead(ctxs[0], "killed")
    scene.pump()
    fresh = scene.worker("ctx-0", "ctx", boot="again", total=10_000)
    scene.pair(ctxs=[*ctxs[1:], fresh])
    share = Counter(scene.turn(blocks(i, 2))[0] for i in range(40))
    assert max(share.values()) <= 1.5 * min(share[boot] for boot in (*ctxs[1:], fresh))


def test_c12_a_router_asks_each_worker_at_each_link_and_again_until_it_is_answered():
    scene = Warm()
    ctx = scene.worker("ctx-0", "ctx")
    assert [q.why for q in scene.taken(ctx, CacheQuery)] == ["link"]
    scene.wait(1.5)
    assert [q.why for q in scene.taken(ctx, CacheQuery)] == ["link"]
    scene.holds(ctx, blocks("a", 3))
    scene.wait(5.0)
    assert not scene.taken(ctx, CacheQuery)
    scene.say(ctx, scene.registers[ctx])  # it has dialled again
    assert [q.why for q in scene.taken(ctx, CacheQuery)] == ["link"]


def test_c11_a_gap_is_asked_about_once_and_the_answer_replaces_all():
    scene = Warm(placement="prefix")
    ctx = scene.worker("ctx-0", "ctx")
    scene.holds(ctx, blocks("a", 3))
    scene.taken(ctx, CacheQuery)
    scene.numbers[ctx] += 1  # lost
    for i in range(5):
        scene.holds(ctx, blocks(f"late {i}", 3))
    scene.beat(ctx, cache_sequence=scene.numbers[ctx])
    assert [q.why for q in scene.taken(ctx, CacheQuery)] == ["gap"]
    assert scene.state.blocks.num_held(ctx) == 3
    scene.numbers[ctx] += 1
    scene.say(ctx, CacheEvent("ctx-0", ctx, scene.numbers[ctx], True, ((NS, blocks("truth", 7)),), ()))
    assert scene.state.blocks.held(ctx) == {NS: frozenset(_split(blocks("truth", 7)))}


def test_c17_another_namespace_or_other_hashes_get_no_credit():
    scene = Warm(placement="prefix")
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    prompt = blocks("p", 50)
    scene.holds(a, prompt)
    assert scene.state.cached_tokens(_place(prompt, OTHER)) == {}
    assert scene.state.cached_tokens(_place(blocks("q", 50))) == {}
    assert scene.state.cached_tokens(_place(prompt)) == {a: 50 * BLOCK}


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_c18_block_and_page_sizes_come_from_the_workers_registration(page):
    scene = Warm(placement="prefix")
    for name, size in (("ctx-0", page), ("ctx-1", 16)):
        boot = scene.worker(name, "ctx", beat=False)
        compat = COMPAT
        scene.registers[boot] = Register(name, boot, "ctx", "ctx", "10.0.0.1", 1, 1000, size, 256, 4096, compat, 0, "")
        scene.say(boot, scene.registers[boot])
    prompt = blocks("p", 21)
    step = max(page, BLOCK) // BLOCK
    said = b"".join(_split(prompt)[step - 1 :: step])
    scene.holds("ctx-0-boot", said)
    assert scene.state.cached_tokens(_place(prompt)) == {"ctx-0-boot": 21 // step * step * BLOCK}
    scene.holds("ctx-1-boot", prompt[:160])
    assert scene.state.cached_tokens(_place(prompt))["ctx-1-boot"] == 10 * BLOCK


def test_a_page_size_that_does_not_go_with_the_block_is_refused():
    scene = Warm()
    register = Register("w", "w-boot", "ctx", "ctx", "10.0.0.1", 1, 10, 48, 256, 4096, COMPAT, 0, "")
    with pytest.raises(ProtocolError, match="48"):
        scene.say("w-boot", register)


def test_the_last_token_of_a_prompt_is_never_counted_as_cached():
    scene = Warm(placement="prefix")
    (a,), _ = scene.cluster(1, 1, total=10_000)
    prompt = blocks("p", 5)
    scene.holds(a, prompt)
    _, key = scene.turn(prompt, more=0)
    assert scene.state.prefill.amount(key) == BLOCK


# ------------------------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("placement", ["prefix", "least_prefill", "least_tokens", "round_robin"])
def test_c15_turns_come_through_any_ingress_and_stay_where_the_conversation_is(placement):
    scene = Warm(placement=placement)
    ctxs, _ = scene.cluster(4, 1, total=10_000)
    scene.ingress("ingress-2")
    first, stayed = {}, 0
    for turn in range(5):
        for talk in range(20):
            history = blocks(f"talk {talk}", 4 * (turn + 1))
            at, key = scene.turn(history, conversation=f"c{talk}", ingress=f"ingress-{1 + (turn + talk) % 2}")
            scene.holds(at, history)
            scene.done(key, ingress=f"ingress-{1 + (turn + talk) % 2}")
            stayed += first.setdefault(talk, at) == at
    assert stayed == 100 and set(first.values()) == set(ctxs)
    dead = first[0]
    scene.core.declare_dead(dead, "killed")
    scene.pump()
    history = blocks("talk 0", 24)
    again = []
    for _ in range(3):
        at, key = scene.turn(history, conversation="c0")
        scene.holds(at, history)
        scene.done(key)
        again.append(at)
    assert dead not in again and len(set(again)) == 1


def test_a_conversation_moves_when_its_worker_would_keep_it_longer_than_computing_it_elsewhere():
    scene = Warm(placement="round_robin")
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    history = blocks("talk", 10)
    at, key = scene.turn(history, conversation="c")
    scene.holds(at, history)
    scene.done(key)
    other = b if at == a else a
    scene.worker("ctx-9", "ctx", beat=False)
    scene.state.prefill.claim(("x", 0), at, 9 * BLOCK)
    assert scene.turn(history, conversation="c")[0] == at
    scene.state.prefill.claim(("y", 0), at, 9 * BLOCK)  # 1000 tokens a second: 0.05 s are 50 tokens
    moved, _ = scene.turn(history, conversation="c")
    assert moved == other
    assert scene.state.conversations.worker("", "c", scene.now) == other


def test_tenants_do_not_share_conversations_and_old_ones_end():
    scene = Warm()
    scene.cluster(2, 1, total=10_000)
    scene.turn(b"", conversation="c", tenant="x")
    talks = scene.state.conversations
    assert talks.worker("x", "c", scene.now) and not talks.worker("y", "c", scene.now)
    assert not talks.worker("x", "c", scene.now + 4000.0)
    talks.bind("y", "other", "boot", scene.now + 4000.0)
    assert len(talks) == 1
    for i in range(70_000):
        talks.bind("y", f"c{i}", "boot", scene.now + 4000.0)
    assert len(talks) == 65536 and not talks.worker("y", "other", scene.now + 4000.0)


# -------------------------------------------------------------------------------------------------------------- gens


def test_a_gen_that_holds_most_of_the_prompt_is_bound_unless_it_is_busier_by_more_than_one():
    scene = Warm(placement="prefix")
    _, gens = scene.cluster(2, 3, total=10_000)
    prompt = blocks("p", 10)
    scene.holds(gens[1], prompt[:128])
    keys = [scene.place(tokens=10 * BLOCK + 10, hashes=prompt) for _ in range(4)]
    chosen = [scene.bind(key) for key in keys]
    assert chosen[0] == gens[1] and chosen.count(gens[1]) <= 2 and len(set(chosen)) == 3


def test_a_short_prompt_is_prefilled_by_the_gen_that_has_its_prefix():
    scene = Warm(local_prefill_max_tokens=2000)
    _, gens = scene.cluster(1, 3, total=10_000)
    prompt = blocks("p", 10)
    scene.holds(gens[2], prompt)
    assert scene.turn(prompt, max_new=50)[0] == gens[2]


def _split(packed):
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


class _place:
    """What the router reads of a Place here."""

    def __init__(self, hashes, namespace=NS):
        self.hashes, self.namespace, self.num_tokens = hashes, namespace, len(hashes) // 16 * BLOCK + 10
