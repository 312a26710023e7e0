"""When a gen computes a prompt itself: the rule alone, and in the router from what workers have measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_scene import Scene

from tailrace.router import view
from tailrace.router.local_prefill import LocalView, cheaper_here, ever_cheaper, handoff_s, local_s, reason, threshold
from tailrace.router.prefill_fit import plain
from tailrace.transfer.messages import PairCost, PrefillSample
from tailrace.transfer.metrics import Metrics

VIEW = LocalView(plain(1000.0), (PairCost("ctx", 1e12, 0.01),), 1000.0, 0.0, 0, 512)


def test_ten_milliseconds_of_overhead_buy_ten_tokens_of_a_millisecond_each():
    assert threshold(VIEW) in (9, 10)
    assert cheaper_here(VIEW, 9) and not cheaper_here(VIEW, 12)


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({"coefficients": None}, 0),
        ({"pairs": ()}, 0),
        ({"pairs": (PairCost("ctx", 0.0, 0.0),)}, 0),
        ({"pairs": (PairCost("ctx", 1e5, 0.01),)}, 512),  # the wire is slower than the arithmetic
        (
            {"pairs": (PairCost("slow", 1e5, 0.01), PairCost("ctx", 1e12, 0.01))},
            9,
        ),  # the quicker pair
        ({"pairs": (PairCost("ctx", 1.5e6, 0.01),)}, 29),  # it costs two thirds of the arithmetic
        ({"streams": 1}, 4),  # each token holds up a stream as long as it takes itself
        ({"streams": 9}, 1),
        ({"streams": 30}, 0),
        ({"backlog_s": 0.006}, 3),
        ({"backlog_s": 0.02}, 0),
        ({"coefficients": (0.008, 0.001, 0.0, 0.001)}, 2),  # most of it is the start of a pass
        ({"most": 4}, 4),
    ],
)
def test_the_threshold_follows_everything_that_is_measured(change, most):
    assert threshold(replace(VIEW, **change)) == pytest.approx(most, abs=1)


VIEWS = st.builds(
    LocalView,
    st.none() | st.tuples(*[st.floats(0, 0.1)] * 4),
    st.lists(st.builds(PairCost, st.just("c"), st.floats(0, 1e12), st.floats(0, 1)), max_size=2).map(tuple),
    st.floats(1, 1e6), st.floats(0, 2), st.integers(0, 40), st.integers(1, 2000),
)  # fmt: skip


@given(VIEWS, st.integers(0, 4000))
def test_what_is_computed_here_never_costs_more_than_its_hand_off(seen, cached):
    most = threshold(seen, cached)
    assert 0 <= most <= seen.most and reason(seen)
    if most:
        assert local_s(seen, most, cached) <= handoff_s(seen, most)
        assert cheaper_here(seen, most, cached)
    if 0 < most < seen.most:
        assert not cheaper_here(seen, most + 1, cached)


@given(VIEWS, st.integers(0, 4000), st.integers(1, 2000))
def test_what_is_never_cheaper_here_is_not_for_any_number_of_tokens(seen, cached, tokens):
    assert ever_cheaper(seen) or not (threshold(seen, cached) or cheaper_here(seen, tokens, cached))


@pytest.mark.parametrize("change", [{"pairs": ()}, {"streams": 300}, {"backlog_s": 0.1}])
def test_where_a_hand_off_is_always_cheaper_is_known_without_a_number_of_tokens(change):
    assert ever_cheaper(VIEW) and not ever_cheaper(replace(VIEW, **change))


# ------------------------------------------------------------------------------------------------------- in the router


def measured(**settings):
    """A ctx and a gen of 1,000 tokens/s, and hand-offs that cost 10 ms beside their bytes."""
    scene = Scene(local_prefill_max_tokens=None, **settings)
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.beat(gen, costs=(PairCost(ctx, 1e9, 0.01),))
    return scene, ctx, gen


def legs(scene, *lengths):
    keys = [scene.place(tokens=tokens) for tokens in lengths]
    placed = [p.leg for p in scene.placed()]
    for key in keys:
        scene.done(key)
    return placed


def test_short_prompts_are_computed_by_gen_once_hand_offs_have_been_measured():
    scene, ctx, gen = measured()
    assert legs(scene, 9) == ["local"] and legs(scene, 12) == ["prefill"]
    assert scene.state.counters["local_chosen"] == 1 and scene.state.counters["local_fallback"] == 0
    scene.beat(gen, costs=(PairCost(ctx, 1.5e6, 0.01),))
    assert legs(scene, 25) == ["local"]
    scene.beat(gen, costs=())
    assert legs(scene, 2) == ["prefill"]
    scene.assert_quiet()


def test_a_gen_without_prefills_of_its_own_is_taken_to_be_as_ctx_until_it_has_some():
    scene, ctx, gen = measured()
    scene.beat(gen, prefill_tokens_per_s=0.0)
    assert legs(scene, 9) == ["local"]
    for _ in range(5):
        scene.beat(gen, prefills=(PrefillSample(9, 0, 0, 0.09),))
    scene.beat(gen, prefills=())
    assert legs(scene, 9) == ["prefill"]
    scene = Scene(local_prefill_max_tokens=None)
    (ctx,), (gen,) = scene.cluster(1, 1, rate=0.0)
    scene.beat(gen, costs=(PairCost(ctx, 1e9, 0.01),))
    assert legs(scene, 2) == ["prefill"]  # nobody has measured a prefill


def test_a_gen_that_decodes_for_others_computes_less_itself():
    scene, *_ = measured()
    long = scene.place(tokens=300)
    scene.bind(long)
    scene.placed()
    assert legs(scene, 8) == ["prefill"] and legs(scene, 4) == ["local"]
    scene.done(long)
    assert legs(scene, 8) == ["local"]


def test_a_burst_of_short_prompts_does_not_pile_up_on_gen():
    """Each local prefill makes the next one wait: what is over goes to ctx."""
    scene, *_ = measured()
    for _ in range(10):
        scene.place(tokens=4)
    placed = [p.leg for p in scene.placed()]
    assert placed[0] == "local" and 1 <= placed.count("local") <= 3


def test_what_gen_holds_needs_no_prefill_so_only_the_rest_counts(monkeypatch):
    """F10: all but ten tokens are there."""
    scene, _, gen = measured()
    held = {gen: 390}
    monkeypatch.setattr(
        scene.core.placer, "cached_tokens", lambda record, worker: held.get(worker.boot, 0), raising=True
    )
    assert legs(scene, 399) == ["local"]
    assert legs(scene, 410) == ["prefill"]
    fixed = Scene(local_prefill_max_tokens=16)
    _, (gen,) = fixed.cluster(1, 1)
    monkeypatch.setattr(fixed.core.placer, "cached_tokens", lambda record, worker: 390 * (worker.boot == gen))
    assert legs(fixed, 400) == ["local"] and legs(fixed, 407) == ["prefill"]


@pytest.mark.parametrize("settings", [{"local_prefill_max_tokens": 0}, {"local_prefill": "never"}])
def test_e4_where_it_is_switched_off_gen_computes_nothing_however_cheap(settings):
    scene = Scene(**settings)
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.beat(gen, costs=(PairCost(ctx, 1.0, 10.0),))
    assert legs(scene, 1, 4) == ["prefill"] * 2


def test_the_cluster_page_says_the_threshold_and_why():
    scene, ctx, gen = measured()

    def shown():
        pools = view.cluster(scene.state, scene.core.placer, scene.now)["pools"]
        assert pools["ctx"]["workers"][0]["local_prefill"] is None
        return pools["gen"]["workers"][0]["local_prefill"]

    assert shown()["max_tokens"] in (9, 10) and "hand-off 10.00 ms" in shown()["why"]
    scene.beat(gen, costs=())
    assert shown() == {"max_tokens": 0, "why": "no hand-off has been measured"}
    scene = Scene(local_prefill_max_tokens=7)
    scene.cluster(1, 1)
    assert shown() == {"max_tokens": 7, "why": "as configured"}


def test_chosen_and_fallback_are_counted_apart():
    scene, ctx, _ = measured()
    legs(scene, 5)
    scene.core.declare_dead(ctx, "killed")
    scene.beats.pop(ctx)
    assert legs(scene, 100) == ["local"]
    metrics = Metrics("router", "r", "m")
    view.update_metrics(metrics, scene.state, scene.now)
    for kind in ("chosen", "fallback"):
        assert metrics.value("tailrace_local_prefills_total", reason=kind) == 1
