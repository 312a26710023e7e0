"""The fit of prefill seconds on made-up workers whose truth is known: near it soon, whatever kind of worker it is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_scene import Scene

from tailrace.router.ledger import PrefillClaims
from tailrace.router.prefill_fit import LEAST_S, PrefillFit, plain, predict_s
from tailrace.transfer.messages import PrefillSample

LINEAR = (0.0, 1 / 500, 0.0, 1 / 500)
QUADRATIC = (0.01, 1 / 800, 2e-6, 1 / 900)
FAST = (0.004, 1 / 20_000, 1e-9, 1 / 20_000)  # a start costs as much as eighty tokens
TRUTHS = {"linear": LINEAR, "quadratic": QUADRATIC, "fast": FAST}


class Truth:
    """A worker with known coefficients. `noise`: of the logarithm; one in `stall_every` takes 3 to 20 times as long."""

    def __init__(self, coefficients, *, seed=0, noise=0.0, stall_every=0, cached=4000):
        self.coefficients, self.noise, self.stall_every, self.cached = coefficients, noise, stall_every, cached
        self.random = random.Random(seed)

    def request(self):
        draw = self.random
        uncached = int(2 ** draw.uniform(2, 11))
        cached = draw.choice((0, 0, draw.randrange(self.cached)))
        return uncached, cached, draw.choice((0, 0, draw.randrange(500)))

    def seconds(self, request):
        seconds = predict_s(self.coefficients, *request) * math.exp(self.random.gauss(0, self.noise))
        stalls = self.stall_every and self.random.randrange(self.stall_every) == 0
        return seconds * self.random.uniform(3, 20) if stalls else seconds

    def teach(self, fit, count, prior):
        for _ in range(count):
            request = self.request()
            fit.learn([PrefillSample(*request, self.seconds(request))], prior)

    def mean_error(self, coefficients, count=100):
        """Of predictions against the truth without its noise."""
        requests = [self.request() for _ in range(count)]
        right = [predict_s(self.coefficients, *request) for request in requests]
        return sum(abs(predict_s(coefficients, *q) - s) / s for q, s in zip(requests, right, strict=True)) / count


PRIORS = st.sampled_from([50.0, 1000.0, 100_000.0]).map(plain)


@pytest.mark.parametrize("name", TRUTHS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), prior=PRIORS)
def test_forty_exact_samples_are_enough_for_any_kind_of_worker(name, seed, prior):
    fit, truth = PrefillFit(), Truth(TRUTHS[name], seed=seed)
    truth.teach(fit, 40, prior)
    assert truth.mean_error(fit.known) < 0.05
    truth.teach(fit, 80, prior)
    assert truth.mean_error(fit.known) < 0.01


@pytest.mark.parametrize("name", TRUTHS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), prior=PRIORS)
def test_noise_of_ten_percent_is_averaged_out_and_single_stalls_do_not_show(name, seed, prior):
    fit, truth = PrefillFit(), Truth(TRUTHS[name], seed=seed, noise=0.1, stall_every=20)
    truth.teach(fit, 200, prior)
    assert truth.mean_error(fit.known) < 0.08


def test_it_predicts_better_than_a_plain_rate_where_prompts_look_back():
    fit, truth = PrefillFit(), Truth(QUADRATIC, noise=0.1)
    truth.teach(fit, 200, plain(1000.0))
    rate = 0.0
    for _ in range(200):  # the smoothed rate, which the workers' schedulers keep, of the same work
        request = truth.request()
        measured = (request[0] + request[2]) / truth.seconds(request)
        rate += (measured - rate) * (0.2 if rate else 1.0)
    assert truth.mean_error(fit.known) < 0.05
    assert truth.mean_error(plain(rate)) > 0.2


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("name", TRUTHS)
def test_a_worker_whose_speed_changes_is_followed_within_twenty_samples(name, factor):
    for seed in range(10):
        fit, truth = PrefillFit(), Truth(TRUTHS[name], seed=seed, noise=0.1)
        truth.teach(fit, 200, plain(1000.0))
        truth.coefficients = tuple(factor * c for c in truth.coefficients)
        assert truth.mean_error(fit.known) > 0.6
        truth.teach(fit, 20, plain(1000.0))
        assert truth.mean_error(fit.known) < 0.2


def test_the_first_sample_already_sets_the_speed():
    fit = PrefillFit()
    fit.learn([PrefillSample(200, 0, 0, 4.0)], plain(1000.0))
    assert predict_s(fit.known, 100) == pytest.approx(2.0, rel=0.05)
    assert predict_s(fit.known, 400) == pytest.approx(8.0, rel=0.05)


def test_what_the_samples_do_not_tell_is_as_the_prior_has_it():
    """All requests of one length: how the times grow with it only the prior knows."""
    fit = PrefillFit()
    for _ in range(100):
        fit.learn([PrefillSample(100, 0, 0, 0.2)], QUADRATIC)
    alike = predict_s(QUADRATIC, 1000) / predict_s(QUADRATIC, 100)
    assert predict_s(fit.known, 100) == pytest.approx(0.2, rel=0.02)
    assert predict_s(fit.known, 1000) / predict_s(fit.known, 100) == pytest.approx(alike, rel=0.2)


SAMPLES = st.builds(
    PrefillSample, st.integers(-1, 10**6), st.integers(-1, 10**6), st.integers(-1, 10**6),
    st.floats(allow_nan=True, allow_infinity=True),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(SAMPLES, max_size=4), max_size=30), PRIORS)
def test_whatever_a_worker_says_no_coefficient_is_negative_or_not_a_number(batches, prior):
    fit = PrefillFit()
    for batch in batches:
        errors = fit.learn(batch, prior)
        assert all(math.isfinite(error) and error >= 0 for error in errors)
        known = fit.known or prior
        assert all(math.isfinite(c) and c >= 0 for c in known)
        assert predict_s(known, 1) >= LEAST_S
    assert math.isfinite(fit.error)


def test_the_error_is_that_of_predictions_made_before_the_sample_was_known():
    fit = PrefillFit()
    (error,) = fit.learn([PrefillSample(100, 0, 0, 0.2)], plain(1000.0))
    assert error == pytest.approx(0.5) and fit.error == pytest.approx(0.5)


# -------------------------------------------------------------------------------------------------------- in the router


def taught(scene, boot, coefficients, count=40, seed=0):
    truth = Truth(coefficients, seed=seed)
    for _ in range(count):
        request = truth.request()
        scene.beat(boot, prefills=(PrefillSample(*request, truth.seconds(request)),))
    scene.beat(boot, prefills=())


def predicted(scene, boot, uncached=500, cached=0):
    return scene.core.placer.predicted_prefill_s(scene.state.workers.get(boot), uncached, cached)


def test_a_worker_without_samples_is_predicted_by_its_rate_then_by_its_duty_then_by_itself():
    scene = Scene()
    one, two = scene.worker("ctx-0", "ctx", rate=1000.0), scene.worker("ctx-1", "ctx", rate=1000.0)
    slow = scene.worker("ctx-2", "ctx", rate=100.0)
    scene.worker("ctx-3", "ctx", rate=1000.0)
    gen = scene.worker("gen-0", "gen", rate=0.0)
    assert predicted(scene, two) == predicted(scene, gen) == pytest.approx(500 / 775)
    assert predicted(scene, slow) == pytest.approx(5.0)
    taught(scene, one, QUADRATIC)
    right = predict_s(QUADRATIC, 500)
    assert predicted(scene, one) == pytest.approx(right, rel=0.05)
    assert predicted(scene, two) == pytest.approx(right, rel=0.1)
    assert predicted(scene, gen) == pytest.approx(right, rel=0.1)
    assert predicted(scene, slow) == pytest.approx(7.75 * right, rel=0.1)
    taught(scene, two, LINEAR)
    assert predicted(scene, two) == pytest.approx(predict_s(LINEAR, 500), rel=0.05)


def test_a_worker_that_comes_back_begins_with_what_is_known_of_the_others():
    scene = Scene()
    one, two = scene.worker("ctx-0", "ctx"), scene.worker("ctx-1", "ctx")
    taught(scene, one, tuple(10 * c for c in LINEAR))
    taught(scene, two, LINEAR, count=200)
    again = scene.worker("ctx-0", "ctx", boot="another")
    assert scene.state.workers.get(again).fit.num_samples == 0
    assert predicted(scene, again) == pytest.approx(predicted(scene, two), rel=0.2)


def test_claims_in_seconds_know_that_long_prompts_cost_more_a_token_and_return_to_zero():
    scene = Scene(max_backlog_s=1e9)
    (ctx,), _ = scene.cluster(1, 1, total=2000)
    taught(scene, ctx, QUADRATIC, count=200)
    long, short = scene.place(tokens=1000), [scene.place(tokens=100) for _ in range(5)]
    scene.done(long)
    five = scene.state.claimed_s(scene.state.workers.get(ctx))
    assert five == pytest.approx(5 * predict_s(QUADRATIC, 100), rel=0.05)
    for key in short:
        scene.done(key)
    assert scene.state.claimed_s(scene.state.workers.get(ctx)) == 0
    long = scene.place(tokens=1000)
    whole = scene.state.claimed_s(scene.state.workers.get(ctx))
    assert whole == pytest.approx(predict_s(QUADRATIC, 1000), rel=0.05)
    scene.progress(long, ready=500, total=1000, last=False, seconds_left=9.0)
    rest = predict_s(QUADRATIC, 500, 500)
    assert scene.state.claimed_s(scene.state.workers.get(ctx)) == pytest.approx(rest, rel=0.05)
    scene.done(long)
    scene.assert_quiet()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("cmrg"), st.integers(0, 900), st.integers(0, 1)), max_size=40)
)
def test_the_books_of_prefill_claims_add_up_after_any_steps(steps):
    claims = PrefillClaims()
    for number, step, amount, holder in steps:
        key, boot = (str(number), 0), f"w{holder}"
        if step == "c" and key not in claims:
            claims.claim(key, boot, amount, amount + 100)
        elif step == "m" and key in claims:
            claims.move(key, boot, amount)
        elif step == "r":
            claims.reduce(key, amount)
        elif step == "g":
            claims.give_back(key)
        claims.check()
    for number in range(6):
        claims.give_back((str(number), 0))
    assert claims.work("w0") == claims.work("w1") == (0, 0, 0) and not len(claims)


def test_the_cluster_page_and_the_metrics_show_how_wrong_the_predictions_are():
    from tailrace.router import view
    from tailrace.transfer.metrics import Metrics

    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    metrics = Metrics("router", "r", "m")
    scene.beat(ctx, prefills=(PrefillSample(100, 0, 0, 0.2),))
    scene.beat(ctx, prefills=())
    shown = view.cluster(scene.state, scene.core.placer, scene.now)["pools"]["ctx"]["workers"][0]["prefill"]
    assert shown["samples"] == 1 and shown["error_ratio"] == 0.5 and shown["seconds"]["token"] > 0
    view.update_metrics(metrics, scene.state, scene.now)
    view.update_metrics(metrics, scene.state, scene.now)
    assert metrics.value("tailrace_prefill_prediction_error_ratio_count") == 1
    assert metrics.value("tailrace_prefill_prediction_error_ratio_sum") == pytest.approx(0.5)


def test_old_heartbeats_without_samples_change_nothing():
    scene = Scene()
    boot = scene.worker("ctx-0", "ctx", rate=2000.0)
    before = predicted(scene, boot)
    scene.beats[boot] = replace(scene.beats[boot], running=3)
    scene.beat(boot)
    assert predicted(scene, boot) == before == 0.25
