"""The flow of one request, driven by hand with an injected clock: attempts, legs, deaths, ends."""

import pytest

from tailrace.model.sampling_params import SamplingParams
from tailrace.router.api_errors import Failure
from tailrace.router.attempt import ToRouter, ToWorker
from tailrace.router.detokenize import TextStream, TokenTable
from tailrace.router.flow import BACKOFF_S, GIVEN_BACK, Flow, FlowPolicy, Spec
from tailrace.router.sample import Sample
from tailrace.router.stop_strings import StopStrings
from tailrace.transfer.messages import (
    NOT_HELD,
    Cancel,
    Delta,
    Done,
    Fail,
    Place,
    Placed,
    Refused,
    Renew,
    Submit,
    Timing,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)  # fmt: skip
from tailrace.transfer.request_state import State


class Letters:
    """Token i is the i-th small letter."""

    vocab_size = 26
    special_ids = frozenset()

    def id_to_bytes(self, token):
        return bytes([ord("a") + token])


TABLE = TokenTable(Letters())


class Run:
    """A flow, its clock, and what it did."""

    def __init__(self, *, samples=1, stops=None, policy=None, deadline=None, **params):
        self.now = 100.0
        self.stops = StopStrings(stops) if stops else None
        self.samples = samples
        spec = Spec(
            request="r", prompt_ids=[5, 6, 7], packed_ids=pack_ids([5, 6, 7]),
            params=SamplingParams(**({"max_tokens": 8} | params)), samples=samples,
            hashes=b"h" * 16, hash_ids=lambda ids: bytes(len(ids)), namespace=b"n" * 16, deadline=deadline,
        )  # fmt: skip
        self.flow = Flow(spec, policy or FlowPolicy(), self._make(), self.now)
        self.sent = self.flow.start()

    def _make(self):
        return [Sample(i, TextStream(TABLE, self.stops)) for i in range(self.samples)]

    def did(self, actions):
        """Actions as (where, frame)."""
        self.sent += actions
        return [("router" if isinstance(a, ToRouter) else a.leg.worker, a.frame) for a in actions]

    def placed(self, leg, worker, attempt=None):
        attempt = self.flow.attempt if attempt is None else attempt
        frame = Placed("r", attempt, leg, worker, f"boot-{worker}", "host", 1)
        return self.did(self.flow.on_placed(frame, self.now))

    def tokens(self, worker, start, ids, *, sample=0, finish=None, stop_id=None, attempt=None, **more):
        attempt = self.flow.attempt if attempt is None else attempt
        fields = {"logprobs": (), "prompt_logprobs": (), "cached_tokens": 0, "stamps": {}} | more
        delta = Delta("r", attempt, sample, start, pack_ids(ids), finish=finish, stop_id=stop_id, **fields)
        return self.did(self.flow.on_delta(f"boot-{worker}", delta, self.now))

    def gone(self, worker, *, dead=True, reached=True):
        return self.did(self.flow.on_gone(f"boot-{worker}", self.now, dead=dead, reached=reached))

    def fails(self, worker, code="transfer", retryable=True):
        fail = Fail("r", self.flow.attempt, code, "words", retryable)
        return self.did(self.flow.on_fail(f"boot-{worker}", fail, self.now))

    def tick(self, seconds, *, router_up=True):
        self.now += seconds
        return self.did(self.flow.tick(self.now, router_up=router_up))

    def decoding(self):
        """Up to the second token, from gen."""
        self.placed("prefill", "ctx")
        self.tokens("ctx", 0, [0])
        self.placed("decode", "gen")
        self.tokens("gen", 1, [1])
        return self

    def dones(self):
        return [
            (a.frame.attempt, a.frame.outcome)
            for a in self.sent
            if isinstance(a, ToRouter) and isinstance(a.frame, Done)
        ]

    def text(self):
        return "".join(piece.text for piece in self.flow.samples[0].pieces)


def kinds(did):
    return [(where, type(frame)) for where, frame in did]


def test_the_usual_way():
    run = Run()
    (place,) = [a.frame for a in run.sent]
    assert isinstance(place, Place) and (place.attempt, place.num_tokens, place.max_new_tokens) == (1, 3, 8)
    assert run.flow.state is State.QUEUED
    ((where, submit),) = run.placed("prefill", "ctx")
    assert where == "ctx" and isinstance(submit, Submit) and submit.leg == "prefill"
    assert unpack_ids(submit.prompt_ids) == [5, 6, 7] and submit.output_ids == b""
    assert run.tokens("ctx", 0, [0], stamps={"prefill": 1.0}, cached_tokens=2) == []
    assert run.flow.state is State.PREFILLED_UNBOUND and run.flow.cached_tokens == 2
    assert run.placed("decode", "gen") == [("gen", Renew((("r", 1),), 10.0))]
    assert run.flow.state is State.READING and [leg.worker for leg, _ in run.flow.held()] == ["ctx", "gen"]
    run.tokens("gen", 1, [1])
    assert run.flow.state is State.DECODING and [leg.worker for leg, _ in run.flow.held()] == ["gen"]
    timing = Timing(run.flow.stamps.first_token - run.flow.stamps.began, 0.0, 1.0, 2)
    done = Done("r", 1, "finished", "", (), timing, 3, 3)
    assert run.tokens("gen", 2, [2], finish="length") == [("router", done)]
    assert run.flow.state is State.FINISHED and run.text() == "abc" and run.flow.completion_tokens == 3


REPLAYS = FlowPolicy(left_to_gen=2)


def test_a_first_token_that_gen_draws_and_one_that_is_all():
    """handoff_mode bounded_replay_on_generation: nothing comes from ctx, which is held until gen speaks."""
    run = Run(policy=REPLAYS, max_tokens=1)
    assert run.sent[0].frame.left_to_gen == 2
    ((_, submit),) = run.placed("prefill", "ctx")
    assert submit.left_to_gen == 2
    assert run.placed("decode", "gen") == [("gen", Renew((("r", 1),), 10.0))]
    assert [leg.worker for leg, _ in run.flow.held()] == ["ctx", "gen"]
    stamps = {"queue": 0.5, "prefill": 1.0, "replay": 0.25}
    ((where, done),) = run.tokens("gen", 0, [0], finish="length", stamps=stamps, cached_tokens=2)
    assert (where, done.outcome, done.timing.prefill_s, run.flow.cached_tokens) == ("router", "finished", 1.0, 2)
    assert run.text() == "a"


def test_what_is_left_to_gen_follows_from_what_is_asked_for():
    for params, left in (
        ({}, 2), ({"max_tokens": 0, "prompt_logprobs": 1}, 0), ({"prompt_logprobs": 1}, 0), ({"max_tokens": 0}, 0),
    ):  # fmt: skip
        run = Run(policy=REPLAYS, **params)
        assert run.sent[0].frame.left_to_gen == left, params
        assert run.placed("prefill", "ctx")[0][1].left_to_gen == left
    run = Run(policy=REPLAYS)
    ((_, local),) = run.placed("local", "gen")
    assert local.left_to_gen == 0, "a gen that computes all of it leaves nothing to anybody"


def test_an_attempt_stays_about_as_many_tokens_as_the_router_was_told():
    """Prompt logprobs that another attempt brings in between change nothing of it; the next attempt leaves tokens."""
    run = Run(policy=REPLAYS, prompt_logprobs=1)
    run.flow.prompt_logprobs = (TokenLogprob(5, None, ()),)
    assert run.placed("prefill", "ctx")[0][1].left_to_gen == 0
    run.gone("ctx")
    run.tick(1.0)
    assert run.sent[-1].frame.left_to_gen == 2


def test_a_ctx_that_dies_after_it_handed_over_what_gen_replays_costs_no_attempt():
    """Whether it had is gen's to say: by its first token, by Fail, or by its silence."""
    run = Run(policy=REPLAYS)
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.tokens("gen", 0, [0])
    assert run.flow.state is State.DECODING and run.gone("ctx") == []
    run = Run(policy=REPLAYS)
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    assert run.gone("ctx") == [] and run.tick(FlowPolicy().rebind_wait_s - 0.5) == []
    run.tokens("gen", 0, [0])
    assert run.tick(60.0) == [] and run.dones() == []
    run.tokens("gen", 1, [1], finish="length")
    assert run.dones() == [(1, "finished")] and run.text() == "ab"


@pytest.mark.parametrize("retryable", [True, False], ids=["recompute", "transfer_failure_policy: fail"])
def test_a_ctx_that_dies_before_gen_has_what_it_replays_costs_an_attempt(retryable):
    """As soon as gen says so; no transfer failed, and it is not gen that is avoided."""
    run = Run(policy=REPLAYS)
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.gone("ctx")
    sent = run.fails("gen", "lost", retryable)
    assert [type(frame) for _, frame in sent] == [Done, Place]
    assert (sent[1][1].attempt, sent[1][1].exclude) == (2, ("boot-ctx",)) and run.dones() == [(1, "migrating")]


def test_a_gen_that_says_nothing_behind_a_dead_ctx_costs_an_attempt():
    run = Run(policy=REPLAYS)
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.gone("ctx")
    sent = run.tick(FlowPolicy().rebind_wait_s + 0.1)
    assert [type(frame) for _, frame in sent] == [Cancel, Done, Place]


def test_a_dead_ctx_without_a_gen_costs_an_attempt_whoever_draws_the_first_token():
    run = Run(policy=REPLAYS)
    run.placed("prefill", "ctx")
    assert [type(frame) for _, frame in run.gone("ctx")] == [Done, Place]


def test_a_gen_bound_before_the_first_token():
    run = Run()
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    assert run.flow.state is State.READING
    run.tokens("ctx", 0, [0])
    run.tokens("gen", 1, [1], finish="length")
    assert run.flow.state is State.FINISHED and run.text() == "ab"


def test_local_prefill_has_one_leg():
    run = Run()
    ((where, submit),) = run.placed("local", "gen")
    assert (where, submit.leg) == ("gen", "local")
    run.tokens("gen", 0, [0])
    assert run.flow.state is State.DECODING
    run.tokens("gen", 1, [1], finish="stop", stop_id=1)
    assert run.text() == "a" and run.flow.completion_tokens == 2


def test_a_first_token_that_ends_the_request_frees_the_gen_that_was_bound():
    run = Run(max_tokens=1)
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    assert kinds(run.tokens("ctx", 0, [0], finish="length")) == [("gen", Cancel), ("router", Done)]
    late = run.placed("decode", "gen-2")
    assert kinds(late) == [("gen-2", Cancel)]  # bound for nobody


def test_gens_tokens_may_overtake_the_first_one():
    run = Run()
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.tokens("gen", 1, [1])
    assert run.text() == ""
    run.tokens("ctx", 0, [0])
    assert run.text() == "ab"
    run.tokens("gen", 1, [1])
    run.tokens("gen", 1, [1, 2], finish="length")
    assert run.text() == "abc" and run.flow.stale == 1


def test_what_an_attempt_sent_too_early_is_void_in_the_next():
    run = Run()
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.tokens("gen", 2, [9], finish="length")
    run.gone("gen")
    run.placed("local", "gen-2")
    run.tokens("gen-2", 0, [0])
    run.tokens("gen-2", 1, [1])
    assert run.text() == "ab" and not run.flow.ended
    run.tokens("gen-2", 2, [2], finish="length")
    assert run.text() == "abc"


def test_a_first_token_that_never_comes_leads_to_a_new_attempt():
    run = Run()
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.tokens("gen", 1, [1])
    assert run.tick(1.0) == []
    did = run.tick(1.1)
    assert kinds(did) == [("gen", Cancel), ("router", Done), ("router", Place)]
    assert did[2][1].attempt == 2 and did[2][1].num_tokens == 3


def test_a_stop_string_is_told_to_the_worker():
    run = Run(stops=["bc"]).decoding()
    assert kinds(run.tokens("gen", 2, [2, 3])) == [("gen", Cancel), ("router", Done)]
    assert run.text() == "a" and run.flow.completion_tokens == 3
    assert run.flow.samples[0].finish == "stop"


def test_a_gen_that_dies_while_decoding_is_replaced_in_the_same_stream():
    run = Run(seed=7).decoding()
    did = run.gone("gen")
    assert kinds(did) == [("router", Done), ("router", Place)]
    assert did[0][1].outcome == "migrating"
    place = did[1][1]
    assert (place.attempt, place.num_tokens, place.max_new_tokens, place.deaths) == (2, 5, 6, 1)
    assert place.exclude == ("boot-gen",) and place.hashes == bytes(5)
    assert run.flow.state is State.MIGRATING
    ((_, submit),) = run.placed("prefill", "ctx")
    assert unpack_ids(submit.output_ids) == [0, 1] and submit.params == run.flow.spec.params
    run.tokens("gen", 2, [9], attempt=1)  # the dead one's last words
    run.tokens("ctx", 2, [2])
    run.placed("decode", "gen-2")
    run.tokens("gen-2", 3, [3], finish="length")
    assert run.text() == "abcd" and run.flow.stale == 1
    assert run.dones() == [(1, "migrating"), (2, "finished")]


def test_a_ctx_that_dies_before_the_first_token_is_replaced_and_its_gen_told():
    run = Run()
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    did = run.gone("ctx")
    assert kinds(did) == [("gen", Cancel), ("router", Done), ("router", Place)]


def test_a_ctx_that_dies_while_gen_reads_is_left_to_gen():
    run = Run()
    run.placed("prefill", "ctx")
    run.tokens("ctx", 0, [0])
    run.placed("decode", "gen")
    assert run.gone("ctx") == []
    run.tokens("gen", 1, [1])
    assert run.flow.state is State.DECODING and run.tick(60.0) == []
    run.tokens("gen", 2, [2], finish="length")
    assert run.flow.state is State.FINISHED


def test_a_gen_that_cannot_read_on_says_so_and_one_that_is_silent_is_given_up():
    for silent in (False, True):
        run = Run()
        run.placed("prefill", "ctx")
        run.tokens("ctx", 0, [0])
        run.placed("decode", "gen")
        run.gone("ctx")
        did = run.tick(10.1) if silent else run.fails("gen", "expired")
        assert kinds(did)[-1] == ("router", Place)
        assert (("gen", Cancel) in kinds(did)) is silent  # the one that failed needs no telling


def test_a_ctx_that_dies_after_the_hand_off_is_not_missed():
    run = Run().decoding()
    assert run.gone("ctx") == [] and run.flow.deaths == 0


@pytest.mark.parametrize("prefilled", [False, True])
def test_a_gen_that_dies_before_its_first_token_costs_no_prefill(prefilled):
    run = Run()
    run.placed("prefill", "ctx")
    if prefilled:
        run.tokens("ctx", 0, [0])
    run.placed("decode", "gen")
    assert run.gone("gen") == [] and run.flow.attempt == 1
    assert kinds(run.placed("decode", "gen-2")) == [("gen-2", Renew)]
    if not prefilled:
        run.tokens("ctx", 0, [0])
    run.tokens("gen-2", 1, [1], finish="length")
    assert run.text() == "ab" and run.dones() == [(1, "finished")]


def test_nobody_takes_over_from_a_dead_gen():
    run = Run()
    run.placed("prefill", "ctx")
    run.tokens("ctx", 0, [0])
    run.placed("decode", "gen")
    run.gone("gen")
    assert run.tick(9.9) == []
    assert kinds(run.tick(0.2)) == [("ctx", Cancel), ("router", Done), ("router", Place)]


def test_a_worker_that_has_not_what_it_holds_is_replaced_at_once_and_not_avoided():
    run = Run()
    run.placed("local", "gen")
    did = run.fails("gen", NOT_HELD)
    assert kinds(did) == [("router", Done), ("router", Place)]
    assert did[0][1].faults == did[1][1].exclude == ()
    run.placed("prefill", "ctx")
    assert kinds(run.fails("ctx", NOT_HELD)) == [("router", Done)]
    assert kinds(run.tick(0.2)) == [("router", Place)]
    run.decoding()
    assert kinds(run.fails("gen", NOT_HELD)) == [("router", Done)]


def test_a_ctx_that_has_handed_over_is_not_missed_but_who_took_it_is():
    run = Run()
    run.placed("prefill", "ctx")
    run.tokens("ctx", 0, [0])
    assert run.fails("ctx", NOT_HELD) == [], "the word of which gen has it may be under way"
    assert run.tick(9.0) == run.fails("ctx", NOT_HELD) == []
    run.placed("decode", "gen")
    assert run.tick(20.0) == run.fails("ctx", NOT_HELD) == []
    other = Run()
    other.placed("prefill", "ctx")
    other.tokens("ctx", 0, [0])
    for _ in range(3):  # every renewal is answered so, and the first answer counts
        assert other.fails("ctx", NOT_HELD) == other.tick(3.3) == []
    assert kinds(other.tick(0.2)) == [("ctx", Cancel), ("router", Done), ("router", Place)]


@pytest.mark.parametrize("reason, again", [("gen_lost", True), ("bind_failed", True), ("no_gen", False)])
def test_a_refusal_after_the_placing(reason, again):
    run = Run()
    run.placed("prefill", "ctx")
    run.tokens("ctx", 0, [0])
    did = run.did(run.flow.on_refused(Refused("r", 1, 503, reason, 2.0), run.now))
    assert (kinds(did)[-1] == ("router", Place)) is again
    assert ("ctx", Cancel) in kinds(did)
    if not again:
        assert run.flow.state is State.FAILED and run.flow.failure.retry_after_s == 2.0


def test_two_deaths_end_a_request():
    run = Run().decoding()
    run.gone("gen")
    run.placed("local", "gen-2")
    run.now += 1.0
    did = run.gone("gen-2")
    assert kinds(did) == [("router", Done)] and run.flow.state is State.FAILED
    assert run.flow.failure.status == 503 and run.flow.reason == "worker_deaths"
    assert run.dones() == [(1, "migrating"), (2, "failed")]


def test_workers_that_die_together_are_one_death_and_a_third_later_is_another():
    """All ctx workers are killed: whoever was placed anew on the second before its death is known is not to blame."""
    run = Run()
    for worker in ("ctx", "ctx-2", "ctx-3"):
        run.placed("prefill", worker)
        run.gone(worker)
        run.tick(0.15)
    assert run.flow.deaths == 1 and not run.flow.ended
    run.tick(1.0)
    run.placed("prefill", "ctx-4")
    run.gone("ctx-4")
    assert run.flow.deaths == 2 and run.flow.reason == "worker_deaths"


def test_a_death_counts_once_however_it_is_told():
    run = Run().decoding()
    run.gone("gen", dead=False)
    assert run.flow.deaths == 0 and run.flow.attempt == 2
    run.gone("gen")
    run.gone("gen")
    assert run.flow.deaths == 1 and run.flow.attempt == 2


def test_a_worker_that_was_never_reached_did_not_die_of_this_request():
    run = Run()
    run.placed("prefill", "ctx")
    did = run.gone("ctx", dead=True, reached=False)
    assert kinds(did) == [("router", Done), ("router", Place)]
    run.gone("ctx")
    assert run.flow.deaths == 0


def test_a_broken_link_to_a_living_worker_is_a_new_attempt_and_the_old_one_is_cancelled_there():
    run = Run().decoding()
    assert kinds(run.gone("gen", dead=False)) == [("gen", Cancel), ("router", Done), ("router", Place)]
    run.placed("local", "gen")  # the same worker may serve it again
    run.tokens("gen", 2, [2], finish="length")
    assert run.text() == "abc"


def test_a_place_on_a_worker_known_to_be_dead_is_asked_for_again_after_a_pause():
    run = Run()
    run.placed("prefill", "ctx")
    run.gone("ctx")
    did = run.placed("prefill", "ctx")
    assert kinds(did) == [("router", Done)]
    assert kinds(run.tick(0.11)) == [("router", Place)] and run.flow.attempt == 3


def test_attempts_are_bounded_and_spaced():
    run = Run()
    for attempt, pause in enumerate(BACKOFF_S, 1):
        assert run.flow.attempt == attempt
        run.placed("prefill", "ctx")
        did = run.fails("ctx", "out_of_pages")
        if pause:
            assert kinds(did) == [("router", Done)]
            did = run.tick(pause)
        assert kinds(did)[-1] == ("router", Place)
    run.placed("prefill", "ctx")
    assert kinds(run.fails("ctx", "out_of_pages")) == [("router", Done)]
    assert run.flow.state is State.FAILED and run.flow.failure.status == 503


def test_without_retries_the_first_loss_is_the_end():
    policy = FlowPolicy(retries=False)
    for lose in (lambda run: run.gone("gen"), lambda run: run.fails("gen")):
        run = Run(policy=policy).decoding()
        lose(run)
        assert run.flow.state is State.FAILED and run.flow.attempt == 1
    run = Run(policy=policy)
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    assert kinds(run.gone("gen")) == [("ctx", Cancel), ("router", Done)]


@pytest.mark.parametrize("code, status", [("timeout", 504), ("internal", 500), ("out_of_pages", 503), ("new", 500)])
def test_a_fault_that_may_not_be_retried_has_its_status(code, status):
    run = Run().decoding()
    assert kinds(run.fails("gen", code, retryable=False)) == [("router", Done)]
    assert run.flow.failure == Failure(status, code, "words", 1.0 if status == 503 else None)


def test_samples_without_a_token_begin_again_together():
    run = Run(samples=2)
    run.placed("local", "gen")
    assert kinds(run.gone("gen")) == [("router", Done), ("router", Place)]
    assert run.sent[-1].frame.samples == 2
    ((_, submit),) = run.placed("local", "gen-2")
    assert (submit.samples, submit.first_sample, submit.output_ids) == (2, 0, b"")
    run.tokens("gen-2", 0, [0], sample=0, finish="length")
    run.tokens("gen-2", 0, [1], sample=1, finish="length")
    assert run.flow.state is State.FINISHED and run.dones() == [(1, "migrating"), (2, "finished")]


def test_samples_in_mid_stream_go_on_each_by_itself_and_those_that_ended_stay():
    run = Run(samples=3, seed=5)
    run.placed("local", "gen")
    for sample, ids, finish in ((0, [0], None), (1, [1], "length"), (2, [2, 3], None)):
        run.tokens("gen", 0, ids, sample=sample, finish=finish)
    did = run.gone("gen")
    assert kinds(did) == [("router", Done), ("router", Place), ("router", Place)]
    places = [frame for _, frame in did[1:]]
    assert [(p.attempt, p.samples, p.num_tokens, p.max_new_tokens) for p in places] == [(2, 1, 4, 7), (3, 1, 5, 6)]
    ((_, one),) = run.placed("prefill", "ctx", attempt=2)
    ((_, two),) = run.placed("local", "gen-2", attempt=3)
    assert (one.first_sample, unpack_ids(one.output_ids), one.params.seed) == (0, [0], 5)
    assert (two.first_sample, unpack_ids(two.output_ids), two.samples) == (2, [2, 3], 1)
    assert run.tokens("gen", 2, [9], sample=2, attempt=1) == []  # the dead one's last words
    run.tokens("gen-2", 2, [4], sample=2, attempt=3)
    assert run.tokens("gen-2", 0, [9], sample=0, attempt=3) == []  # not that attempt's sample
    run.tokens("ctx", 1, [5], sample=0, attempt=2)
    run.placed("decode", "gen-2", attempt=2)
    assert {(leg.worker, key) for leg, key in run.flow.held()} == {
        ("ctx", ("r", 2)), ("gen-2", ("r", 2)), ("gen-2", ("r", 3)),
    }  # fmt: skip
    assert kinds(run.tokens("gen-2", 3, [6], sample=2, attempt=3, finish="length")) == [("router", Done)]
    assert not run.flow.ended
    run.tokens("gen-2", 2, [7], sample=0, attempt=2, finish="length")
    assert run.flow.state is State.FINISHED and run.flow.deaths == 1
    assert [sample.ids for sample in run.flow.samples] == [[0, 5, 7], [1], [2, 3, 4, 6]]
    assert run.dones() == [(1, "migrating"), (3, "finished"), (2, "finished")] and run.flow.stale == 2


def test_one_death_that_hits_several_attempts_counts_once_and_the_second_ends_all_of_them():
    run = Run(samples=2)
    run.placed("local", "gen")
    run.tokens("gen", 0, [0], sample=0)
    run.tokens("gen", 0, [1], sample=1)
    run.gone("gen")
    run.placed("local", "gen-2", attempt=2)
    run.placed("local", "gen-2", attempt=3)
    run.now += 1.0
    did = run.gone("gen-2")
    assert run.flow.deaths == 2 and kinds(did) == [("router", Done), ("router", Done)]
    assert run.flow.state is State.FAILED and run.flow.reason == "worker_deaths" and run.flow.held() == []
    assert sorted(run.dones()) == [(1, "migrating"), (2, "failed"), (3, "failed")]


def test_a_refusal_of_one_samples_attempt_ends_the_others_too():
    run = Run(samples=2)
    run.placed("local", "gen")
    run.tokens("gen", 0, [0], sample=0)
    run.tokens("gen", 0, [1], sample=1)
    run.gone("gen")
    run.placed("local", "gen-2", attempt=2)
    did = run.did(run.flow.on_refused(Refused("r", 3, 503, "no_gen", 1.0), run.now))
    assert kinds(did) == [("router", Done), ("gen-2", Cancel), ("router", Done)]
    assert run.flow.state is State.FAILED and run.flow.failure.retry_after_s == 1.0


def test_a_cancel_ends_every_samples_attempt():
    run = Run(samples=2)
    run.placed("local", "gen")
    run.tokens("gen", 0, [0], sample=0)
    run.tokens("gen", 0, [1], sample=1)
    run.gone("gen", dead=False)
    run.placed("local", "gen", attempt=3)
    did = run.did(run.flow.cancel("client"))
    assert kinds(did) == [("router", Done), ("gen", Cancel), ("router", Done)]
    assert did[1][1].attempt == 3 and run.flow.state is State.CANCELLED


def test_a_gen_that_gives_a_request_back_for_want_of_pages_is_not_avoided_and_costs_no_try():
    run = Run(max_tokens=200)
    for number in range(len(BACKOFF_S) + 3):
        run.placed("local", "gen")
        run.tokens("gen", number, [number])
        did = run.fails("gen", "out_of_pages")
        assert kinds(did) == [("router", Done)] and did[0][1].faults == ()
        assert run.tick(0.05) == [], "at once, the pages would still be missing"
        assert kinds(run.tick(1.0)) == [("router", Place)]
    assert run.sent[-1].frame.exclude == ()
    assert run.flow.samples[0].ids == list(range(len(BACKOFF_S) + 3))


def test_giving_back_is_bounded_too():
    run = Run()
    for _ in range(GIVEN_BACK):
        run.placed("local", "gen")
        run.fails("gen", "out_of_pages")
        run.tick(1.0)
    run.placed("local", "gen")
    run.fails("gen", "out_of_pages")
    assert run.flow.state is State.FAILED and run.flow.failure.status == 503


@pytest.mark.parametrize(
    "code, faults",
    [
        ("internal", ("boot-gen",)), ("transfer", ("boot-ctx", "boot-gen")), ("corrupt", ("boot-ctx", "boot-gen")),
        ("expired", ()), ("out_of_pages", ()), ("refused", ()), ("lost", ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("retryable", [True, False])
def test_only_faults_of_workers_are_reported_as_such(code, faults, retryable):
    run = Run()
    run.placed("prefill", "ctx")
    run.tokens("ctx", 0, [0])
    run.placed("decode", "gen")
    run.fails("gen", code, retryable=retryable)
    (done,) = [a.frame for a in run.sent if isinstance(a, ToRouter) and isinstance(a.frame, Done)]
    assert done.faults == faults


def test_a_transfer_that_stalls_is_a_fault_and_a_deadline_is_not():
    for retryable, faults in ((True, ("boot-ctx", "boot-gen")), (False, ())):
        run = Run()
        run.placed("prefill", "ctx")
        run.placed("decode", "gen")
        run.fails("gen", "timeout", retryable=retryable)
        (done,) = [a.frame for a in run.sent if isinstance(a, ToRouter) and isinstance(a.frame, Done)]
        assert done.faults == faults


def test_a_broken_link_is_its_workers_fault_and_a_death_or_a_cancel_is_not_reported():
    for lose, faults in (
        (lambda run: run.gone("gen", dead=False), ("boot-gen",)),
        (lambda run: run.gone("gen"), ()),
        (lambda run: run.did(run.flow.cancel("client")), ()),
    ):
        run = Run().decoding()
        lose(run)
        (done,) = [a.frame for a in run.sent if isinstance(a, ToRouter) and isinstance(a.frame, Done)]
        assert done.faults == faults


def test_the_shape_of_a_request_tells_no_content():
    run = Run(temperature=0.5, logit_bias=((7, 1.5),), stop_token_ids=(3,), logprobs=2, seed=99)
    shape = run.flow.shape()
    assert (shape["prompt_tokens"], shape["samples"], shape["max_tokens"]) == (3, 1, 8)
    assert shape["params"] == {
        "temperature": 0.5, "logit_bias": "1 given", "stop_token_ids": "1 given", "logprobs": 2,
    }  # fmt: skip


def test_one_sample_ended_by_a_stop_string_waits_for_the_other():
    run = Run(samples=2, stops=["b"])
    run.placed("local", "gen")
    assert run.tokens("gen", 0, [1], sample=0) == []
    assert run.tokens("gen", 1, [2], sample=0) == []  # still generated, no longer heard
    did = run.tokens("gen", 0, [0], sample=1, finish="length")
    assert kinds(did) == [("gen", Cancel), ("router", Done)]
    assert run.flow.completion_tokens == 2


@pytest.mark.parametrize("where", ["queued", "placed", "prefilled", "reading", "decoding", "migrating"])
def test_a_cancel_reaches_everyone_who_knows_the_request(where):
    run = Run()
    told = []
    if where != "queued":
        run.placed("prefill", "ctx")
        told = ["ctx"]
    if where in ("prefilled", "reading", "decoding"):
        run.tokens("ctx", 0, [0])
    if where in ("reading", "decoding"):
        run.placed("decode", "gen")
        told = ["ctx", "gen"]
    if where == "decoding":
        run.tokens("gen", 1, [1])
        told = ["gen"]
    if where == "migrating":
        run.fails("ctx")
        told = []
    did = run.did(run.flow.cancel("client"))
    assert kinds(did) == [(worker, Cancel) for worker in told] + [("router", Done)]
    assert run.flow.state is State.CANCELLED and run.dones()[-1] == (run.flow.attempt, "cancelled")
    assert run.flow.cancel("client") == [] and run.tick(1000.0) == []


def test_a_refused_request_is_done():
    run = Run()
    did = run.did(run.flow.on_refused(Refused("r", 1, 429, "queue_full", 3.0), run.now))
    assert did == [("router", Done("r", 1, "refused", "queue_full"))] and run.flow.state is State.REFUSED
    assert (run.flow.failure.status, run.flow.failure.retry_after_s) == (429, 3.0)


def test_a_deadline_ends_it_everywhere():
    run = Run(deadline=110.0).decoding()
    assert isinstance(run.sent[0].frame, Place) and run.sent[0].frame.deadline_s == 10.0
    assert run.tick(9.0) == []
    assert kinds(run.tick(1.0)) == [("gen", Cancel), ("router", Done)]
    assert run.flow.failure.status == 504


def test_no_router_is_waited_for_and_then_refused():
    run = Run()
    assert run.tick(1.0, router_up=False) == [] and run.tick(4.9, router_up=False) == []
    assert kinds(run.tick(0.2, router_up=False)) == [("router", Done)]
    assert run.flow.state is State.REFUSED and run.flow.failure.status == 503
    assert run.flow.failure.retry_after_s == 5.0


def test_a_new_router_is_asked_what_it_may_not_know():
    run = Run()
    run.tick(3.0, router_up=False)
    ((_, place),) = run.did(run.flow.router_up(run.now))
    assert (place.attempt, place.at) == (1, "")
    assert run.tick(4.0, router_up=False) == []  # the wait begins anew
    run.placed("prefill", "ctx")
    ((_, place),) = run.did(run.flow.router_up(run.now))
    assert (place.attempt, place.at) == (1, "boot-ctx")
    run.placed("decode", "gen")
    assert run.flow.router_up(run.now) == []


def test_prompt_logprobs_are_asked_for_once():
    run = Run(prompt_logprobs=0)
    ((_, submit),) = run.placed("local", "gen")
    assert submit.no_cache and submit.params.prompt_logprobs == 0
    run.tokens("gen", 0, [0], prompt_logprobs=(TokenLogprob(5, None, ()),))
    run.gone("gen")
    ((_, submit),) = run.placed("local", "gen-2")
    assert not submit.no_cache and submit.params.prompt_logprobs is None
    assert len(run.flow.prompt_logprobs) == 1


def test_after_corrupt_pages_later_attempts_use_no_cached_ones():
    run = Run()
    ((_, submit),) = run.placed("prefill", "ctx")
    assert not submit.no_cache
    run.tokens("ctx", 0, [0])
    run.placed("decode", "gen")
    run.fails("gen", "corrupt")
    ((_, submit),) = run.placed("prefill", "ctx")
    assert submit.no_cache and submit.attempt == 2


def test_frames_of_strangers_and_of_other_attempts_change_nothing():
    run = Run().decoding()
    assert run.tokens("stranger", 2, [2]) == [] and run.tokens("gen", 2, [2], attempt=9) == []
    assert run.tokens("gen", 2, [2], sample=5) == [] and run.fails("ctx") == []
    assert run.did(run.flow.on_refused(Refused("r", 9, 503, "no_gen", 1.0), run.now)) == []
    assert run.flow.stale == 5 and run.text() == "ab"


def test_echo_without_output_ends_with_the_prefill():
    run = Run(max_tokens=0, prompt_logprobs=0)
    run.placed("prefill", "ctx")
    assert kinds(run.tokens("ctx", 0, [], finish="length")) == [("router", Done)]
    assert run.flow.state is State.FINISHED and run.flow.completion_tokens == 0


def test_every_action_names_a_worker_that_is_not_known_dead():
    run = Run()
    run.placed("prefill", "ctx")
    run.placed("decode", "gen")
    run.gone("gen")
    did = run.did(run.flow.cancel("client"))
    assert [where for where, _ in did] == ["ctx", "router"]
    assert all(isinstance(a, ToWorker | ToRouter) for a in run.sent)


def served(run):
    return [(a.frame.prompt_tokens, a.frame.output_tokens) for a in run.sent if isinstance(a.frame, Done)]


def test_what_was_served_is_told_once_over_all_attempts():
    run = Run().decoding()
    run.gone("gen")
    run.placed("local", "gen-2")
    run.tokens("gen-2", 2, [2], finish="length")
    assert served(run) == [(3, 2), (0, 1)]


def test_nothing_was_served_before_the_first_token():
    run = Run()
    run.placed("prefill", "ctx")
    run.did(run.flow.cancel("client"))
    assert served(run) == [(0, 0)]


def test_what_several_samples_were_served_is_told_once_though_each_goes_on_alone():
    run = Run(samples=2)
    run.placed("prefill", "ctx")
    run.tokens("ctx", 0, [0], sample=0)
    run.tokens("ctx", 0, [0], sample=1)
    run.gone("ctx")
    run.placed("local", "gen", attempt=2)
    run.placed("local", "gen", attempt=3)
    run.tokens("gen", 1, [1, 2], sample=0, finish="length", attempt=2)
    run.tokens("gen", 1, [1, 2], sample=1, finish="length", attempt=3)
    assert [sum(told) for told in zip(*served(run), strict=True)] == [3, 6]
