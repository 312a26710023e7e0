"""The gen loop: hand-offs, forks, local prefill, giving way, ends. Tokens come from what the pages really hold."""

import threading
from dataclasses import replace

import pytest
from gen_fakes import Gen
from loop_fakes import EOS, SPACE, expected_tokens, handoff_of, prompt_of, submit_of

from tailrace.gen_worker.loop import BLOCKED_WAIT_S, IDLE_WAIT_S
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.loop_events import Admitted, Cancelled
from tailrace.transfer.messages import Moved


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 31])
def test_a_handoff_goes_on_as_if_it_had_been_prefilled_here(length):
    gen = Gen()
    key = gen.admit("r", prompt_of(length), max_tokens=12, logprobs=1)
    gen.drain()
    gen.assert_equals_undisturbed(key)
    assert all(len(d.logprobs) == 1 for d in gen.node.deltas(key))
    assert gen.node.loop_stats.prompt_positions == 0  # gen computes no prompt position
    assert all(len(plan.rows[0].ids) == 1 for plan in gen.engine.steps)
    gen.assert_quiet()


def test_a_pass_streams_all_sequences_in_one_call_and_ends_after_their_last_tokens():
    gen = Gen()
    keys = [gen.admit(f"r{i}", prompt_of(5 + i, i), max_tokens=4) for i in range(3)]
    for _ in range(2):
        gen.loop.run_pass()
    assert [len(p) for p in gen.node.passes] == [3, 3] and not gen.node.ends
    gen.loop.run_pass()
    assert set(gen.node.ends) == set(keys)
    assert [d.finish for d in gen.node.passes[-1]] == ["length"] * 3
    gen.assert_quiet()


def test_admissions_of_a_pass_are_bounded():
    gen = Gen(admissions=2)
    for i in range(5):
        gen.admit(f"r{i}", prompt_of(4, i), max_tokens=20)
    joined = []
    for _ in range(3):
        gen.loop.run_pass()
        joined.append(gen.node.loop_stats.running)
    assert joined == [2, 4, 5]


def test_the_batch_never_exceeds_its_size_and_everybody_gets_through():
    gen = Gen(num_pages=200, batch=3, admissions=8)
    keys = [gen.admit(f"r{i}", prompt_of(6, i), max_tokens=5) for i in range(9)]
    gen.drain()
    assert max(len(plan.rows) for plan in gen.engine.steps) == 3
    for key in keys:
        gen.assert_equals_undisturbed(key)


def test_the_most_urgent_handoff_joins_first():
    gen = Gen(batch=1, num_pages=100)
    gen.admit("running", prompt_of(4), max_tokens=3)
    gen.loop.run_pass()
    late, urgent = gen.admit("late", prompt_of(4, 1)), gen.admit("urgent", prompt_of(4, 2), priority=-1)
    gen.drain()
    assert list(gen.node.ends) == [("running", 0), urgent, late]


def test_pages_of_ended_requests_stay_as_an_evictable_prefix():
    gen = Gen()
    prompt = prompt_of(10)
    gen.admit("r", prompt)
    gen.drain()
    hit = gen.kv.match_prefix(SPACE, handoff_of("r", prompt).hashes, 10, whole=True)
    assert hit.num_tokens == 8
    gen.kv.release(hit.pages)
    gen.assert_quiet()


# ---------------------------------------------------------------------------------------------------- stop, length


def test_a_sample_that_ctx_ended_is_never_decoded():
    gen = Gen()
    prompt = prompt_of(7)
    key = gen.admit("r", prompt, samples=3, finished=(True, False, True))
    gen.drain()
    assert gen.node.deltas(key, 0) == [] and gen.node.deltas(key, 2) == []
    gen.assert_equals_undisturbed(key, 1)
    gen.assert_quiet()


def test_a_handoff_with_nothing_left_to_decode_ends_at_once():
    gen = Gen()
    key = gen.admit("r", prompt_of(7), max_tokens=1, finished=(True,))
    gen.drain()
    assert gen.node.ends == {key: "finished"} and not gen.engine.steps
    gen.assert_quiet()


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_the_token_limit_counts_the_token_that_ctx_gave(max_tokens):
    gen = Gen()
    key = gen.admit("r", prompt_of(7), max_tokens=max_tokens)
    gen.drain()
    assert len(gen.node.output(key)) == max_tokens - 1 and gen.node.finish(key) == "length"


@pytest.mark.parametrize(
    ("params", "tokens", "finish"),
    [
        ({}, 2, "stop"),
        ({"ignore_eos": True}, 7, "length"),
        ({"min_tokens": 3}, 7, "length"),
        ({"min_tokens": 2}, 2, "stop"),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, 2, "stop"),
    ],
)
def test_an_end_token_ends_the_sample_and_is_named(params, tokens, finish):
    gen = Gen()
    gen.engine.forced[9] = EOS  # the third output token of a prompt of 7
    key = gen.admit("r", prompt_of(7), **params)
    gen.drain()
    assert len(gen.node.output(key)) == tokens and gen.node.finish(key) == finish
    assert gen.node.deltas(key)[-1].stop_id == (EOS if finish == "stop" else None)
    assert EOS in gen.node.output(key)
    gen.assert_quiet()


# ---------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("length", [3, 4, 7, 8, 9])
def test_samples_share_full_pages_and_copy_only_the_open_one(length):
    gen = Gen()
    key = gen.admit("r", prompt_of(length), samples=3, max_tokens=9)
    before = gen.kv.counts().used
    gen.loop.run_pass()
    grown = 3 * (length % 4 == 0)  # each needs a page for its next token
    assert gen.kv.counts().used == before + (2 if length % 4 else 0) + grown
    gen.drain()
    for sample in range(3):
        gen.assert_equals_undisturbed(key, sample)
    gen.assert_quiet()


def test_samples_that_end_at_different_times_leave_no_page_behind():
    gen = Gen()
    key = gen.admit("r", prompt_of(6), samples=2, max_tokens=30)
    tokens, _ = expected_tokens(prompt_of(6), gen.handoffs[key].params, sample=1)
    gen = Gen()
    key = gen.admit("r", prompt_of(6), samples=2, max_tokens=30, stop_token_ids=(tokens[4],))
    gen.drain()
    assert gen.node.finish(key, 1) == "stop" and len(gen.node.output(key, 1)) == 4
    gen.assert_equals_undisturbed(key, 0)
    gen.assert_quiet()


def test_more_samples_than_slots_still_get_through():
    gen = Gen(batch=2)
    key = gen.admit("r", prompt_of(6), samples=4)
    gen.drain()
    for sample in range(4):
        gen.assert_equals_undisturbed(key, sample)


def test_copies_that_do_not_fit_are_computed_again_once_they_do():
    gen = Gen(num_pages=5)
    key = gen.admit("r", prompt_of(14), samples=4, max_tokens=3)
    gen.drain()
    for sample in range(4):
        gen.assert_equals_undisturbed(key, sample)
    gen.assert_quiet()


# ---------------------------------------------------------------------------------------------------- local requests


@pytest.mark.parametrize("length", [1, 4, 5, 31, 32, 33, 90])
def test_a_local_request_is_prefilled_and_decoded_here(length):
    gen = Gen(num_pages=100)
    prompt = prompt_of(length)
    key = gen.local("r", prompt, max_tokens=6)
    gen.drain()
    gen.assert_local_equals_undisturbed(key, prompt, max_tokens=6)
    assert gen.node.loop_stats.prompt_positions == length
    gen.assert_quiet()


def test_local_prefill_shares_passes_with_decode_rows_within_the_budget():
    gen = Gen(num_pages=200, budget=16, batch=8)
    running = [gen.admit(f"d{i}", prompt_of(5, i), max_tokens=30) for i in range(4)]
    gen.loop.run_pass()
    prompt = prompt_of(100, 9)
    key = gen.local("r", prompt)
    mixed = 0
    for _ in range(9):
        gen.loop.run_pass()
        plan = gen.engine.steps[-1]
        assert plan.num_tokens <= 16
        mixed += sum(len(r.ids) == 1 for r in plan.rows) == 4 and plan.num_tokens == 16
        assert len(gen.node.passes[-1]) >= 4  # nobody's stream pauses
    assert mixed >= 8
    gen.drain()
    gen.assert_local_equals_undisturbed(key, prompt)
    for k in running:
        gen.assert_equals_undisturbed(k)


def test_a_local_request_carries_what_belongs_to_its_first_delta():
    gen = Gen()
    prompt = prompt_of(40)
    gen.local("warm", prompt[:20], max_tokens=1)
    gen.drain()
    key = gen.local("r", prompt, samples=2, max_tokens=3)
    echo = gen.local("e", prompt, prompt_logprobs=0, max_tokens=2)
    gen.drain()
    first = gen.node.deltas(key, 0)[0]
    assert first.cached_tokens == 20 and set(first.stamps) == {"queue", "prefill"}
    assert gen.node.deltas(key, 1)[0].cached_tokens == 0
    assert [p.token for p in gen.node.deltas(echo)[0].prompt_logprobs] == prompt
    assert gen.node.deltas(echo)[0].cached_tokens == 0
    for sample in range(2):
        gen.assert_local_equals_undisturbed(key, prompt, sample, max_tokens=3)
    gen.assert_quiet()


def test_a_local_echo_without_tokens_gives_one_empty_delta_a_sample():
    gen = Gen()
    key = gen.local("r", prompt_of(40), samples=2, max_tokens=0, prompt_logprobs=0)
    gen.drain()
    assert [(d.ids, d.finish) for s in range(2) for d in gen.node.deltas(key, s)] == [(b"", "length")] * 2
    assert len(gen.node.deltas(key, 0)[0].prompt_logprobs) == 40
    assert gen.node.ends[key] == "finished"
    gen.assert_quiet()


def test_a_later_attempt_goes_on_behind_what_was_sent():
    gen = Gen()
    prompt = prompt_of(13)
    whole, _ = expected_tokens(prompt, SamplingParams(max_tokens=8, temperature=0.0))
    key = gen.local("r", prompt, output=whole[:3])
    gen.drain()
    assert gen.node.output(key) == whole[3:]
    assert gen.node.deltas(key)[0].start == 3
    again = gen.admit("s", prompt, output=whole[:3])
    gen.drain()
    assert gen.node.output(again) == whole[4:]


def test_without_a_prefill_scheduler_a_local_request_is_refused():
    gen = Gen(prefill=False)
    key = gen.local("r", prompt_of(5))
    gen.drain()
    assert gen.node.fails[key][0] == "refused"


def test_a_local_prompt_that_can_never_fit_fails_with_a_typed_error():
    gen = Gen(num_pages=4)
    key = gen.local("r", prompt_of(17))
    gen.drain()
    assert gen.node.fails[key][0] == "out_of_pages" and gen.node.fails[key][2] is False


def test_a_local_prompt_leaves_the_oldest_request_what_it_may_still_need():
    gen = Gen(num_pages=12)
    old = gen.admit("old", prompt_of(8), max_tokens=24)  # 2 pages now, 8 at its end
    gen.loop.run_pass()
    assert gen.node.loop_stats.headroom_pages == 8 - 3
    key = gen.local("r", prompt_of(16, 1))  # 4 pages; 9 are available, 5 of them spoken for
    wide = gen.local("w", prompt_of(20, 2))  # 5 pages do not fit beside that
    gen.loop.run_pass()
    assert gen.node.loop_stats.queued == 1
    assert gen.node.loop_stats.headroom_pages >= 5 + 6
    gen.drain()
    assert gen.node.loop_stats.preemptions == 0
    gen.assert_equals_undisturbed(old)
    gen.assert_local_equals_undisturbed(key, prompt_of(16, 1))
    gen.assert_local_equals_undisturbed(wide, prompt_of(20, 2))
    gen.assert_quiet()


# ---------------------------------------------------------------------------------------------------- giving way


def test_out_of_pages_the_youngest_gives_way_and_all_end_right():
    gen = Gen(num_pages=14)
    keys = [gen.admit(f"r{i}", prompt_of(8, i), max_tokens=30) for i in range(4)]
    gen.drain()
    for key in keys:
        gen.assert_equals_undisturbed(key)
    assert gen.node.loop_stats.preemptions >= 2
    assert gen.node.loop_stats.recomputed_positions > 0
    assert list(gen.node.ends)[0] == keys[0]  # the oldest was never held up
    first_end = next(i for i, p in enumerate(gen.node.passes) if any(d.finish and d.request == "r0" for d in p))
    assert first_end == 28
    gen.assert_quiet()


def test_with_a_prompt_tail_the_youngest_fails_with_a_typed_retryable_error():
    gen = Gen(num_pages=14)
    keys = [gen.admit(f"r{i}", prompt_of(8, i), max_tokens=30, tail=4) for i in range(4)]
    gen.drain()
    assert set(gen.node.fails) | set(gen.node.ends) == set(keys)
    assert gen.node.fails and all(f[0] == "out_of_pages" and f[2] for f in gen.node.fails.values())
    gen.assert_equals_undisturbed(keys[0])
    gen.assert_quiet()


def test_a_tail_that_is_the_whole_prompt_can_be_computed_again():
    gen = Gen(num_pages=14)
    keys = [gen.admit(f"r{i}", prompt_of(8, i), max_tokens=30, tail=8) for i in range(4)]
    gen.drain()
    assert not gen.node.fails
    for key in keys:
        gen.assert_equals_undisturbed(key)


def test_a_waiting_handoff_gives_way_before_a_running_request():
    gen = Gen(num_pages=8, batch=1)
    old = gen.admit("old", prompt_of(8), max_tokens=20)
    gen.loop.run_pass()
    young = gen.admit("young", prompt_of(16, 1), max_tokens=4)
    gen.drain()
    gen.assert_equals_undisturbed(old)
    gen.assert_equals_undisturbed(young)
    assert gen.node.loop_stats.preemptions == 1
    gen.assert_quiet()


def test_samples_of_one_request_that_outgrow_the_pool_end_one_after_another():
    gen = Gen(num_pages=9)
    key = gen.admit("r", prompt_of(10), samples=3, max_tokens=20)
    gen.drain()
    for sample in range(3):
        gen.assert_equals_undisturbed(key, sample)
    assert gen.node.loop_stats.preemptions > 0
    gen.assert_quiet()


def test_a_sequence_that_fills_the_whole_pool_alone_fails_and_frees_it():
    gen = Gen(num_pages=4)
    key = gen.admit("r", prompt_of(8), max_tokens=100)
    gen.drain()
    assert gen.node.fails[key][0] == "out_of_pages" and gen.node.fails[key][2] is False
    gen.assert_quiet()


def test_a_recomputed_sequence_that_would_need_more_than_the_pool_fails_too():
    gen = Gen(num_pages=6)
    keys = [gen.admit(f"r{i}", prompt_of(8, i), max_tokens=100) for i in range(2)]
    gen.drain()
    assert {gen.node.fails[key][:1] + gen.node.fails[key][2:] for key in keys} == {("out_of_pages", False)}
    gen.assert_quiet()


def test_an_older_handoff_that_waits_for_the_only_slot_gets_it_from_a_younger_one_without_pages():
    gen = Gen(num_pages=3, batch=1)
    prompt = prompt_of(8)
    older = gen.admit("older", prompt, max_tokens=4, priority=1)
    handoff = handoff_of("younger", prompt, max_tokens=40, priority=0)
    shared = gen.node.events[0].pages
    gen.kv.hold(shared)  # as a match of the prefix that both have
    gen.node.events.append(Admitted(handoff, shared, 8, 0.0))
    gen.drain()
    assert len(gen.node.output(("younger", 0))) == 4  # it joined first, and filled the last page
    code, message, retryable = gen.node.fails[("younger", 0)]
    assert code == "out_of_pages" and not retryable and "13 tokens" in message  # it alone needs four pages now
    gen.assert_equals_undisturbed(older)
    gen.assert_quiet()


def test_the_first_delta_says_how_the_pages_came_and_no_later_one():
    gen = Gen(num_pages=8)
    key = gen.admit("r", prompt_of(7), max_tokens=6)
    moved = Moved("shm", "raw", 20, 10, 2, 0, True, 0.5)
    gen.node.events[-1] = replace(gen.node.events[-1], moved=moved)
    gen.drain()
    told = [delta.moved for delta in gen.node.deltas(key)]
    assert told[0] == moved and len(told) > 1 and not any(told[1:])


def test_a_younger_request_keeps_its_pages_while_the_older_one_still_runs_without_them():
    gen = Gen(num_pages=5)
    old, young = gen.admit("old", prompt_of(8), max_tokens=4), gen.admit("young", prompt_of(7, 1), max_tokens=6)
    gen.drain()
    gen.assert_equals_undisturbed(old)
    gen.assert_equals_undisturbed(young)
    assert gen.node.loop_stats.preemptions == 0
    gen.assert_quiet()


def test_while_the_transfer_thread_holds_the_last_pages_the_only_request_waits():
    gen = Gen(num_pages=4)
    key = gen.admit("r", prompt_of(7), max_tokens=6)
    lent = gen.kv.allocate(2)
    gen.loop.run_pass()
    assert not gen.loop.run_pass() and not gen.node.fails
    gen.kv.release(lent)
    gen.drain()
    gen.assert_equals_undisturbed(key)
    gen.assert_quiet()


def test_a_prefill_gives_way_to_an_older_request():
    gen = Gen(num_pages=11, budget=4)
    old = gen.admit("old", prompt_of(4), max_tokens=12)
    older_growth = gen.admit("second", prompt_of(4, 1), max_tokens=17)
    gen.loop.run_pass()
    prompt = prompt_of(20, 2)
    key = gen.local("r", prompt, max_tokens=2)
    gen.drain()
    gen.assert_equals_undisturbed(old)
    gen.assert_equals_undisturbed(older_growth)
    gen.assert_local_equals_undisturbed(key, prompt, max_tokens=2)
    stats = gen.node.loop_stats
    assert (stats.preemptions, stats.recomputed_positions) == (1, 0)  # no decoding sequence gave way
    assert stats.prompt_positions > 20
    gen.assert_quiet()


def test_a_local_prompt_waits_for_a_slot_without_holding_pages():
    gen = Gen(batch=1)
    gen.admit("running", prompt_of(4), max_tokens=5)
    gen.loop.run_pass()
    used = gen.kv.counts().used
    prompt = prompt_of(20, 1)
    key = gen.local("r", prompt)
    gen.loop.run_pass()
    assert gen.kv.counts().used == used and gen.node.loop_stats.queued == 1
    gen.drain()
    gen.assert_local_equals_undisturbed(key, prompt)


# ---------------------------------------------------------------------------------------------------- ends early


@pytest.mark.parametrize("passes", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["handoff", "local", "samples"])
def test_a_cancel_frees_every_page_within_one_pass_in_every_state(passes, kind):
    gen = Gen(batch=2, budget=8, admissions=1)
    other = gen.admit("other", prompt_of(6), max_tokens=12)
    if kind == "local":
        key = gen.local("r", prompt_of(30, 1), max_tokens=20)
    else:
        key = gen.admit("r", prompt_of(30, 1), max_tokens=20, samples=3 if kind == "samples" else 1)
    for _ in range(passes):
        gen.loop.run_pass()
    gen.cancel(key)
    gen.loop.run_pass()
    assert gen.node.ends[key] == "cancelled"
    sent = len(gen.node.deltas(key))
    gen.drain()
    assert len(gen.node.deltas(key)) == sent
    gen.assert_equals_undisturbed(other)
    gen.assert_quiet()


def test_a_cancel_reaches_a_sequence_that_waits_to_be_computed_again():
    gen = Gen(num_pages=14)
    keys = [gen.admit(f"r{i}", prompt_of(8, i), max_tokens=30) for i in range(4)]
    while not gen.node.loop_stats.preemptions:
        gen.loop.run_pass()
    gen.cancel(keys[3])
    gen.drain()
    assert gen.node.ends[keys[3]] == "cancelled"
    for key in keys[:3]:
        gen.assert_equals_undisturbed(key)
    gen.assert_quiet()


def test_a_cancel_for_an_unknown_key_is_ignored():
    gen = Gen()
    gen.node.events.append(Cancelled(("nobody", 3), "client"))
    gen.drain()
    assert not gen.node.ends


def test_a_broken_row_fails_its_own_request_only():
    gen = Gen()
    bad, good = gen.admit("bad", prompt_of(6), samples=2), gen.admit("good", prompt_of(6, 1))
    local = gen.local("also bad", prompt_of(40, 2))
    gen.engine.broken |= {bad, local}
    gen.drain()
    assert gen.node.fails[bad][0] == gen.node.fails[local][0] == "internal"
    gen.assert_equals_undisturbed(good)
    gen.assert_quiet()


def test_nothing_is_streamed_for_a_request_whose_later_sample_fails_in_the_same_pass():
    gen = Gen()
    key = gen.admit("r", prompt_of(6), samples=2)
    gen.engine.broken_samples.add((key, 1))
    gen.drain()
    assert gen.node.fails[key][0] == "internal" and not gen.node.passes
    gen.assert_quiet()


def test_a_row_without_a_token_fails_too():
    gen = Gen()
    gen.engine.forced[8] = -1
    key = gen.admit("r", prompt_of(7))
    gen.drain()
    assert gen.node.fails[key][0] == "internal" and not gen.node.deltas(key)
    gen.assert_quiet()


@pytest.mark.parametrize("lost", ["all", "first", "last"])
def test_a_handoff_with_missing_pages_is_refused(lost):
    gen = Gen()
    prompt = prompt_of(10)
    handoff = handoff_of("r", prompt)
    pages = gen.read(handoff, prompt)
    assert pages is not None
    given = {"all": (), "first": (0, *pages[1:]), "last": pages[:-1]}[lost]
    gen.node.events.append(Admitted(handoff, given, 0, 0.0))
    gen.drain()
    assert gen.node.fails[("r", 0)][0] == "transfer" and gen.node.fails[("r", 0)][2]
    assert not gen.engine.steps
    gen.kv.release([p for p in pages if p not in given])
    gen.assert_quiet()


def test_the_same_handoff_twice_is_decoded_once():
    gen = Gen()
    prompt = prompt_of(10)
    key = gen.admit("r", prompt)
    pages = gen.read(gen.handoffs[key], prompt)
    assert pages is not None
    gen.node.events.append(Admitted(gen.handoffs[key], pages, 0, 0.0))
    gen.drain()
    gen.assert_equals_undisturbed(key)
    gen.assert_quiet()


# ---------------------------------------------------------------------------------------------------- window


def test_a_window_gives_back_the_pages_it_has_left():
    gen = Gen(num_pages=20, window=6)
    key = gen.admit("r", prompt_of(30), max_tokens=40, samples=2)
    most = 0
    while key not in gen.node.ends:
        gen.loop.run_pass()
        most = max(most, gen.kv.counts().used)
    for sample in range(2):
        gen.assert_equals_undisturbed(key, sample)
    assert most <= 6
    gen.assert_quiet()


def test_a_window_survives_giving_way():
    gen = Gen(num_pages=10, window=6)
    keys = [gen.admit(f"r{i}", prompt_of(17, i), max_tokens=30) for i in range(3)]
    key = gen.local("l", prompt_of(20, 7), max_tokens=12)
    gen.drain()
    for k in keys:
        gen.assert_equals_undisturbed(k)
    gen.assert_local_equals_undisturbed(key, prompt_of(20, 7), max_tokens=12)
    gen.assert_quiet()


# ---------------------------------------------------------------------------------------------------- report


def test_tokens_carry_the_time_since_the_one_before():
    gen = Gen()
    key = gen.admit("r", prompt_of(7), max_tokens=4)
    gen.loop.run_pass()
    gen.clock.now += 0.5
    gen.drain()
    gaps = [d.stamps["itl"] for d in gen.node.deltas(key)]
    assert gaps == pytest.approx([0.001, 0.501, 0.001])


def test_samples_do_not_wait_for_a_local_prompt_that_waits_for_their_pages():
    gen = Gen(num_pages=4)
    there = gen.local("there", prompt_of(1))
    gen.admit("two", prompt_of(1), samples=2, max_tokens=2)
    lent = gen.kv.allocate(gen.kv.available())  # neither the copy of the open page nor the local prompt fits
    for _ in range(4):
        gen.loop.run_pass()
    assert gen.node.deltas(("two", 0))
    gen.kv.release(lent)
    gen.drain()
    assert gen.node.ends[there] == "finished"
    gen.assert_quiet()


def test_the_loop_sleeps_when_idle_and_checks_its_books():
    gen = Gen()
    gen.admit("r", prompt_of(5))
    checks: list = []
    gen.kv.check, real = (lambda: checks.append(real())), gen.kv.check
    stop = threading.Event()
    checked: list[int] = []  # how many checks there had been at each wait

    def wait(timeout_s: float) -> bool:
        gen.node.waits.append(timeout_s)
        checked.append(len(checks))
        if len(checked) == 4:
            stop.set()
        return len(checked) == 1  # woken at once the first time: it is not idle yet, and nobody waits for a recount

    gen.node.wait = wait
    gen.loop.run(stop)
    assert gen.node.waits == [IDLE_WAIT_S] * 4
    assert checked == [0, 0, 1, 1]
    assert gen.node.loop_stats.stamp == gen.clock.now


def test_the_loop_looks_often_while_something_waits_for_pages():
    gen = Gen(num_pages=4)
    lent = gen.kv.allocate(3)
    gen.local("r", prompt_of(12))
    stop = threading.Event()
    gen.node.wait = lambda timeout_s: (gen.node.waits.append(timeout_s), stop.set())
    gen.loop.run(stop)
    assert gen.node.waits == [BLOCKED_WAIT_S]
    gen.kv.release(lent)


def test_decode_rows_leave_a_quarter_of_the_budget_to_prefill():
    gen = Gen(num_pages=200, batch=64, budget=8, admissions=20)
    for i in range(10):
        gen.admit(f"r{i}", prompt_of(4, i), max_tokens=50)
    gen.loop.run_pass()
    assert len(gen.engine.steps[-1].rows) == 6
    prompt = prompt_of(10, 77)
    submit = submit_of("r", prompt)
    assert submit.leg == "prefill"
    gen.local("local", prompt)
    for _ in range(5):
        gen.loop.run_pass()
    assert all(plan.num_tokens <= 8 for plan in gen.engine.steps)
