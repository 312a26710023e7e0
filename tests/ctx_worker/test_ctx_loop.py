"""The ctx loop on a fake engine that reads back what the pages hold, with the real page pool."""

import threading

import pytest
from loop_fakes import (
    EOS,
    EOS_IDS,
    SPACE,
    Clock,
    FakeEngine,
    FakeNode,
    expected_tokens,
    make_kv,
    prompt_of,
    submit_of,
)

from tailrace.ctx_worker.loop import BLOCKED_WAIT_S, IDLE_WAIT_S, CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.transfer.loop_events import Arrived, Cancelled, FaultsSet


class Ctx:
    """A ctx loop with its surroundings; POISON is on."""

    def __init__(
        self, num_pages: int = 64, *, chunk: int = 16, seconds_per_token: float = 0.01, lower_half: bool = False, **kv
    ):
        self.clock = Clock()
        self.kv = make_kv(num_pages, **kv)
        self.engine = FakeEngine(self.kv, self.clock, seconds_per_token=seconds_per_token)
        self.node = FakeNode(self.kv, pin=True)
        self.scheduler = PrefillScheduler(chunk)
        self.loop = CtxLoop(
            self.engine, self.kv, self.node, self.scheduler, eos_ids=EOS_IDS, lower_half=lower_half, clock=self.clock
        )
        self.node.events.append(FaultsSet(True))
        self.engine.log = self.node.log  # one ordering log for both

    def submit(self, name: str, prompt: list[int], **options) -> tuple[str, int]:
        submit = submit_of(name, prompt, **options)
        self.node.events.append(Arrived(submit, self.clock.now))
        return (submit.request, submit.attempt)

    def drain(self, limit: int = 300) -> None:
        for _ in range(limit):
            if not self.loop.run_pass() and not self.node.events:
                return
        raise AssertionError("the loop does not come to rest")

    def assert_quiet(self) -> None:
        self.node.unpin_all()
        assert self.kv.counts().used == 0
        self.kv.check()
        assert not len(self.scheduler)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 83])
def test_the_first_token_is_that_of_an_undisturbed_run_whatever_the_length(length):
    ctx = Ctx()
    prompt = prompt_of(length)
    key = ctx.submit("r", prompt)
    ctx.drain()
    result = ctx.node.prefilled[key]
    tokens, _ = expected_tokens(prompt, submit_of("r", prompt).params)
    assert [f.token for f in result.firsts] == tokens[:1]
    assert result.num_tokens == length and not result.finished
    assert [ready for _, _, ready, _ in ctx.node.done] == [*range(16, length, 16), length]
    assert [last for _, last, _ in ctx.node.launched] == [False] * (len(ctx.node.launched) - 1) + [True]
    ctx.assert_quiet()


def test_a_chunk_is_told_only_after_its_forward_has_returned():
    ctx = Ctx()
    for i in range(3):
        ctx.submit(f"r{i}", prompt_of(40, i))
    ctx.drain()
    running: set = set()
    for event, about in ctx.node.log:
        if event == "launched":
            running.add(about)
        elif event == "returned":
            assert running == set(about)
            running.clear()
        else:
            assert about not in running
    assert not running


def test_chunks_need_not_end_with_pages_and_no_slot_is_written_twice():
    ctx = Ctx(chunk=10)
    prompt = prompt_of(50)
    key = ctx.submit("r", prompt)
    ctx.drain()
    assert [ready for _, _, ready, _ in ctx.node.done] == [10, 20, 30, 40, 50]
    assert len({pages for _, pages, _, _ in ctx.node.done}) == 1
    assert ctx.node.prefilled[key].firsts[0].token == expected_tokens(prompt, submit_of("r", prompt).params)[0][0]


def test_many_prompts_share_a_pass_and_are_each_right():
    ctx = Ctx(num_pages=200)
    prompts = {ctx.submit(f"r{i}", prompt_of(3 + 7 * i, i)): prompt_of(3 + 7 * i, i) for i in range(8)}
    ctx.drain()
    for key, prompt in prompts.items():
        assert ctx.node.prefilled[key].firsts[0].token == expected_tokens(prompt, submit_of("x", prompt).params)[0][0]
    assert max(len(plan.rows) for plan in ctx.engine.steps) > 1
    assert all(plan.num_tokens <= 16 for plan in ctx.engine.steps)
    ctx.assert_quiet()


def test_a_known_prefix_is_not_computed_again():
    ctx = Ctx()
    prompt = prompt_of(33)
    ctx.submit("a", prompt)
    ctx.drain()
    computed = ctx.node.loop_stats.prompt_positions
    key = ctx.submit("b", prompt[:24] + prompt_of(9, 5))
    ctx.drain()
    assert ctx.node.prefilled[key].cached_tokens == 24
    assert ctx.node.loop_stats.prompt_positions - computed == 9
    same = ctx.submit("c", prompt[:32])
    ctx.drain()
    assert ctx.node.prefilled[same].cached_tokens == 28  # a match ends before the last token
    assert ctx.node.prefilled[same].firsts[0].token == expected_tokens(prompt[:32], submit_of("x", [1]).params)[0][0]
    ctx.assert_quiet()


def test_no_cache_and_prompt_logprobs_compute_every_row():
    ctx = Ctx()
    prompt = prompt_of(33)
    ctx.submit("a", prompt)
    ctx.drain()
    plain = ctx.submit("b", prompt, no_cache=True)
    echo = ctx.submit("c", prompt, prompt_logprobs=0)
    ctx.drain()
    assert ctx.node.prefilled[plain].cached_tokens == ctx.node.prefilled[echo].cached_tokens == 0
    logprobs = ctx.node.prefilled[echo].prompt_logprobs
    assert [p.token for p in logprobs] == prompt
    assert logprobs[0].logprob is None and all(p.logprob == -1.0 for p in logprobs[1:])


def test_every_sample_of_a_request_gets_its_own_first_token_from_one_prefill():
    ctx = Ctx()
    prompt = prompt_of(20)
    key = ctx.submit("r", prompt, samples=3, logprobs=2)
    ctx.drain()
    params = submit_of("r", prompt).params
    firsts = ctx.node.prefilled[key].firsts
    assert [f.token for f in firsts] == [expected_tokens(prompt, params, sample=s)[0][0] for s in range(3)]
    assert all(f.logprob is not None and f.logprob.token == f.token for f in firsts)
    assert ctx.node.loop_stats.prompt_positions == 20


# -------------------------------------------------------------------------------------------------- first token ends it


@pytest.mark.parametrize(
    ("params", "finish"),
    [
        ({"max_tokens": 1}, "stop"),
        ({"max_tokens": 2}, "stop"),
        ({"max_tokens": 2, "ignore_eos": True}, None),
        ({"max_tokens": 1, "ignore_eos": True}, "length"),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (EOS,)}, "stop"),
        ({"max_tokens": 9, "min_tokens": 1}, None),
    ],
)
def test_a_first_token_that_ends_the_request_is_found_here(params, finish):
    ctx = Ctx()
    prompt = prompt_of(9)
    ctx.engine.forced[9] = EOS
    key = ctx.submit("r", prompt, **params)
    ctx.drain()
    first = ctx.node.prefilled[key].firsts[0]
    assert first.finish == finish
    assert first.stop_id == (EOS if finish == "stop" else None)
    assert ctx.node.prefilled[key].finished == (finish is not None)
    assert key not in ctx.node.ends
    ctx.assert_quiet()


def test_one_token_wanted_is_one_token_given():
    ctx = Ctx()
    key = ctx.submit("r", prompt_of(9), max_tokens=1, samples=2)
    ctx.drain()
    assert [f.finish for f in ctx.node.prefilled[key].firsts] == ["length", "length"]
    assert ctx.node.prefilled[key].finished


def test_echo_with_max_tokens_zero_prefills_and_gives_no_token():
    ctx = Ctx()
    prompt = prompt_of(21)
    key = ctx.submit("r", prompt, max_tokens=0, prompt_logprobs=1, samples=2)
    ctx.drain()
    result = ctx.node.prefilled[key]
    assert [(f.token, f.finish) for f in result.firsts] == [(None, "length")] * 2
    assert len(result.prompt_logprobs) == 21 and result.finished
    ctx.assert_quiet()


def test_with_the_lower_half_alone_nothing_is_drawn_and_what_would_need_more_is_refused_by_name():
    ctx = Ctx(lower_half=True)
    prompt = prompt_of(21)
    drawn = ctx.submit("draws", prompt, max_tokens=3)
    echo = ctx.submit("echo", prompt, max_tokens=0, prompt_logprobs=1)
    nothing = ctx.submit("nothing", prompt, max_tokens=0, samples=2)
    ctx.drain()
    assert ctx.node.fails[drawn][:2] == (
        "refused", "nothing is left to gen, and to draw a token needs the upper layers, which are not here"
    )  # fmt: skip
    assert ctx.node.fails[echo][:2] == ("refused", "prompt logprobs need the upper layers, which are not here")
    assert [(f.token, f.finish) for f in ctx.node.prefilled[nothing].firsts] == [(None, "length")] * 2
    rows = [row for plan in ctx.engine.steps for row in plan.rows]
    assert rows and all(row.upper_from == 21 and not row.samplers for row in rows)
    ctx.assert_quiet()


def test_a_later_attempt_goes_on_behind_what_was_sent():
    ctx = Ctx()
    prompt = prompt_of(13)
    whole, _ = expected_tokens(prompt, submit_of("r", prompt).params)
    key = ctx.submit("r", prompt, output=whole[:5], attempt=1)
    ctx.drain()
    result = ctx.node.prefilled[key]
    assert result.firsts[0].token == whole[5] and result.num_tokens == 18
    last = ctx.submit("r", prompt, output=whole[:7], attempt=2)
    ctx.drain()
    assert ctx.node.prefilled[last].firsts[0].finish == "length"


# ------------------------------------------------------------------------------------------------------ pages, waiting


def test_a_prompt_that_can_never_fit_fails_with_a_typed_error():
    ctx = Ctx(num_pages=4)
    key = ctx.submit("r", prompt_of(17))
    fits = ctx.submit("s", prompt_of(16))
    ctx.drain()
    assert ctx.node.fails[key][0] == "out_of_pages" and ctx.node.fails[key][2] is False
    assert fits in ctx.node.prefilled
    ctx.assert_quiet()


def test_a_prompt_that_does_not_fit_now_waits_and_holds_nothing():
    ctx = Ctx(num_pages=10)
    first = ctx.submit("a", prompt_of(32, 1))
    ctx.drain()
    second = ctx.submit("b", prompt_of(32, 2))
    assert not ctx.loop.run_pass()
    assert second not in ctx.node.prefilled and not ctx.node.pinned.get(second)
    assert (ctx.node.loop_stats.queued, ctx.node.loop_stats.running) == (1, 0)
    ctx.clock.now += 3.0
    ctx.loop.run_pass()
    assert ctx.node.loop_stats.queue_age_s == pytest.approx(3.0)
    assert first in ctx.node.prefilled
    ctx.node.unpin_all()  # the first one's pages become an evictable prefix
    ctx.drain()
    assert second in ctx.node.prefilled
    ctx.assert_quiet()


def test_four_prompts_in_a_pool_of_one_and_a_half_all_end():
    ctx = Ctx(num_pages=12)
    keys = [ctx.submit(f"r{i}", prompt_of(32, i)) for i in range(4)]
    for _ in range(200):
        ctx.loop.run_pass()
        for key in [k for k in ctx.node.prefilled if k in ctx.node.pinned]:
            ctx.kv.unpin(ctx.node.pinned.pop(key))
        if len(ctx.node.prefilled) == 4:
            break
    assert set(ctx.node.prefilled) == set(keys)
    ctx.assert_quiet()


def test_pages_stay_pinned_for_the_reader_after_the_loop_let_go():
    ctx = Ctx(num_pages=10)
    ctx.submit("a", prompt_of(32))
    ctx.drain()
    counts = ctx.kv.counts()
    assert (counts.pinned, counts.held) == (8, 0)
    ctx.node.unpin_all()
    assert ctx.kv.counts().cached == 8


# ----------------------------------------------------------------------------------------------------------- ends early


@pytest.mark.parametrize("passes", [0, 1, 3, 6])
def test_a_cancel_takes_effect_at_the_next_chunk_in_every_state(passes):
    ctx = Ctx()
    key = ctx.submit("r", prompt_of(80))
    other = ctx.submit("s", prompt_of(30, 1))
    for _ in range(passes):
        ctx.loop.run_pass()
    told = [k for k, *_ in ctx.node.done].count(key)
    ctx.node.events.append(Cancelled(key, "client"))
    ctx.loop.run_pass()
    if key not in ctx.node.prefilled:
        assert ctx.node.ends == {key: "cancelled"}
        assert [k for k, *_ in ctx.node.done].count(key) == told
    ctx.drain()
    assert other in ctx.node.prefilled
    ctx.assert_quiet()


def test_a_short_prompt_behind_cancelled_long_ones_starts_at_once():
    ctx = Ctx(num_pages=300)
    keys = [ctx.submit(f"long{i}", prompt_of(160, i)) for i in range(5)]
    ctx.loop.run_pass()
    ctx.node.events += [Cancelled(key, "client") for key in keys]
    short = ctx.submit("short", prompt_of(16, 9))
    ctx.loop.run_pass()
    assert short in ctx.node.prefilled
    ctx.assert_quiet()


def test_a_preemption_in_the_step_that_samples_never_hands_over_empty_pages():
    ctx = Ctx()
    key = ctx.submit("r", prompt_of(40))
    ctx.engine.during_step = lambda plan: ctx.loop.preempt(key) if any(r.samplers for r in plan.rows) else None
    ctx.drain()
    assert key not in ctx.node.prefilled
    code, _, retryable = ctx.node.fails[key]
    assert code == "out_of_pages" and retryable
    assert all(ready < 40 for _, _, ready, _ in ctx.node.done)
    ctx.engine.during_step = None
    again = ctx.submit("r", prompt_of(40), attempt=1)
    ctx.drain()
    assert ctx.node.prefilled[again].firsts[0].token == expected_tokens(prompt_of(40), submit_of("r", [1]).params)[0][0]
    ctx.assert_quiet()


def test_a_broken_row_fails_its_own_request_only():
    ctx = Ctx()
    bad, good = ctx.submit("bad", prompt_of(20, 1)), ctx.submit("good", prompt_of(20, 2))
    ctx.engine.broken.add(bad)
    ctx.drain()
    assert ctx.node.fails[bad][0] == "internal" and good in ctx.node.prefilled
    ctx.assert_quiet()


def test_an_empty_prompt_is_refused_and_the_worker_goes_on():
    ctx = Ctx()
    key = ctx.submit("r", [])
    good = ctx.submit("s", prompt_of(3))
    ctx.drain()
    assert ctx.node.fails[key][0] == "refused" and good in ctx.node.prefilled


# --------------------------------------------------------------------------------------------------------------- times


def test_stamps_split_queue_from_prefill():
    ctx = Ctx(seconds_per_token=0.01)
    ctx.submit("a", prompt_of(16, 1))
    key = ctx.submit("b", prompt_of(30, 2))
    ctx.drain()
    stamps = ctx.node.prefilled[key].stamps
    assert stamps["queue"] == pytest.approx(0.16)
    assert stamps["prefill"] == pytest.approx(0.30)


def test_seconds_left_falls_to_zero_with_the_measured_rate():
    ctx = Ctx(seconds_per_token=0.01)
    ctx.submit("r", prompt_of(64))
    ctx.drain()
    assert [left for *_, left in ctx.node.done] == pytest.approx([0.48, 0.32, 0.16, 0.0])
    assert ctx.node.loop_stats.prefill_tokens_per_s == pytest.approx(100.0)


def test_short_prompts_behind_a_huge_one_wait_at_most_four_chunk_times():
    ctx = Ctx(num_pages=600, seconds_per_token=0.1)
    chunk_s = 1.6
    huge = ctx.submit("huge", prompt_of(64 * 16))
    ctx.loop.run_pass()
    arrived: dict = {}
    waited: dict = {}
    for i in range(120):
        if i % 3 == 0 and i < 30:
            arrived[ctx.submit(f"s{i}", prompt_of(16, i + 1))] = ctx.clock.now
        ctx.loop.run_pass()
        for key in arrived.keys() & ctx.node.prefilled.keys() - waited.keys():
            waited[key] = ctx.clock.now - arrived[key]
    assert len(waited) == 10 and max(waited.values()) <= 4 * chunk_s
    assert huge in ctx.node.prefilled


def test_the_loop_sleeps_when_idle_and_checks_its_books():
    ctx = Ctx()
    ctx.submit("r", prompt_of(20))
    checks: list = []
    ctx.kv.check, real = (lambda: checks.append(real())), ctx.kv.check
    stop = threading.Event()
    checked: list[int] = []  # how many checks there had been at each wait

    def wait(timeout_s: float) -> bool:
        ctx.node.waits.append(timeout_s)
        checked.append(len(checks))
        if len(checked) == 4:
            stop.set()
        return len(checked) == 1  # woken at once the first time: it is not idle yet, and nobody waits for a recount

    ctx.node.wait = wait
    ctx.loop.run(stop)
    assert ctx.node.waits == [IDLE_WAIT_S] * 4
    assert checked == [0, 0, 1, 1]
    assert ctx.node.loop_stats.phase == "run" and ctx.node.loop_stats.stamp == ctx.clock.now


def test_the_loop_looks_often_while_requests_wait_for_pages():
    ctx = Ctx(num_pages=10)
    ctx.submit("a", prompt_of(32, 1))
    ctx.submit("b", prompt_of(32, 2))
    stop = threading.Event()
    ctx.node.wait = lambda timeout_s: (ctx.node.waits.append(timeout_s), stop.set())
    ctx.loop.run(stop)
    assert ctx.node.waits == [BLOCKED_WAIT_S]


def test_the_prefix_is_published_under_its_namespace_only():
    ctx = Ctx()
    prompt = prompt_of(16)
    ctx.submit("r", prompt)
    ctx.drain()
    hashes = submit_of("r", prompt).hashes
    assert ctx.kv.match_prefix(b"x" * 16, hashes, 16, whole=True).num_tokens == 0
    hit = ctx.kv.match_prefix(SPACE, hashes, 16, whole=True)
    assert hit.num_tokens == 16
    ctx.kv.release(hit.pages)
