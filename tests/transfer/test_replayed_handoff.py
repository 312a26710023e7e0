"""handoff_mode bounded_replay_on_generation: ctx leaves a prompt's end to gen, which draws the first token. Real loops
and transports over DeepSeek V4.1, as tests/transfer/test_row_handoff.py has them for whole prompts.

An exact replay answers as one process does; a bounded one as one process that replays as much, whatever the chunks, the
transport and the batch. Freed pages are poisoned, and what the upper layers lack is garbage: who reads it is found out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from equal import prompt_of
from oracle import Comparison, Reference, greedy, reference
from row_rig import RowRig, one_process
from tiny_families import write_tiny_family

from tailrace.model.replay_policy import ReplayPolicy, exact_replay
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.messages import Cancel, Fail

PAGE = 16
BOUNDED = ReplayPolicy(20, 20)


@pytest.fixture(scope="module", params=["v41-engram", pytest.param("v41", marks=pytest.mark.soak)])
def ref(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = write_tiny_family(tmp_path_factory.mktemp("replay"), request.param)
    yield reference(directory, tokens_per_page=PAGE, block_tokens=PAGE, num_pages=1000)
    torch.set_num_threads(before)


@pytest.fixture
def make(ref: Reference) -> Iterator[Callable[..., RowRig]]:
    rigs: list[RowRig] = []

    def of(kind: str = "shm", replay: ReplayPolicy = BOUNDED, **options: Any) -> RowRig:
        if kind == "nixl":
            pytest.importorskip("nixl")
        rigs.append(RowRig(ref, kind, replay=replay, **options))
        return rigs[-1]

    of.ref = ref  # type: ignore[attr-defined]
    yield of
    for rig in rigs:
        rig.close()


def assert_bounded(
    rig: RowRig, prompts: Sequence[Sequence[int]], count: int = 8, share: float = 0.9,
    among: Comparison | None = None, **options: Any,
):  # fmt: skip
    """`among` as RowRig.assert_equal has it."""
    assert rig.replay is not None
    answers = rig.ask(prompts, greedy(count), **options)
    comparison = Comparison() if among is None else among
    for answer, prompt in zip(answers, prompts, strict=True):
        assert not answer.failed, answer.failed
        comparison.add(one_process(rig.ref, prompt, rig.replay, count), answer.samples[0])
    if among is None:
        comparison.check(share)
    return answers


def lengths_of(policy: ReplayPolicy) -> list[int]:
    """What is handed over ends before, at and after every border; prompts shorter than the replay, too."""
    return [1, policy.decoder, *(policy.encoder + n for n in (1, 2, 15, 16, 17, 33))]


@pytest.mark.parametrize(("kind", "verify"), [("shm", True), ("nixl", False)])
def test_an_exact_replay_answers_as_one_process_after_every_length(make, kind: str, verify: bool):
    exact = exact_replay(make.ref.source.config).decoder
    rig = make(kind, ReplayPolicy(exact, exact), chunk=40, verify=verify)
    lengths = lengths_of(rig.replay)
    answers = rig.assert_equal([prompt_of(n, 100 + n) for n in lengths], 6)
    layout = rig.ref.layout
    for n, answer in zip(lengths, answers, strict=True):
        handed = max(1, n - exact)
        assert answer.moved.pages == layout.moved_pages(handed) and answer.moved.verified == verify, n
        assert answer.stamps.keys() == {"queue", "prefill", "replay"}
    stats = rig.gen.node.loop_stats
    assert stats.replayed_positions == stats.prompt_positions == sum(min(n, exact) for n in lengths)
    assert rig.ctx.node.loop_stats.prompt_positions == sum(max(1, n - exact) for n in lengths)
    assert rig.ctx.node.loop_stats.output_tokens == 0
    rig.quiet()


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param("shm", BOUNDED, id="decoder"),
        pytest.param("nixl", ReplayPolicy(17, 40), id="encoder longer", marks=pytest.mark.soak),
    ],
)
def test_a_bounded_replay_answers_as_one_process_that_replays_as_much(make, kind: str, policy: ReplayPolicy):
    rig = make(kind, policy, chunk=24)
    lengths = lengths_of(policy)
    assert_bounded(rig, [prompt_of(n, 200 + n) for n in lengths], 6)
    assert rig.gen.node.loop_stats.replayed_positions == sum(min(n, policy.encoder) for n in lengths)
    rig.quiet()


def test_a_bounded_replay_is_another_answer_than_an_exact_one(make):
    """What the test above could not see if nothing were left out."""
    prompt = prompt_of(120, 7)
    exact = exact_replay(make.ref.source.config)
    near, far = (one_process(make.ref, prompt, policy, 12) for policy in (BOUNDED, exact))
    (whole,) = make.ref.generate([prompt], greedy(12))
    assert max(abs(a.logprob - b.logprob) for a, b in zip(far, whole.samples[0].logprobs, strict=True)) < 1e-4
    assert max(abs(a.logprob - b.logprob) for a, b in zip(near, far, strict=True)) > 1e-3


def test_what_ctx_keeps_is_found_again_and_never_by_who_needs_the_upper_half(make):
    rig = make(chunk=32, whole_ctx=True)
    prompt = prompt_of(90, 5)
    (cold,) = assert_bounded(rig, [prompt])
    (warm,) = assert_bounded(rig, [prompt])
    kept = (90 - BOUNDED.encoder - 1) // PAGE * PAGE
    assert (cold.cached_tokens, warm.cached_tokens) == (0, kept) and warm.samples == cold.samples
    assert warm.moved.pages_skipped == (90 - BOUNDED.encoder) // PAGE, "its history is exact, and gen has it"
    turn = [*prompt, *warm.samples[0], *prompt_of(30, 6)]
    (longer,) = assert_bounded(rig, [turn])
    assert longer.cached_tokens == kept
    rig.replay = None  # whole prompts, on the same workers and caches
    for leg in ("prefill", "local"):
        for again in (0, 1):
            (whole,) = rig.assert_equal([prompt], 8, leg=leg)
            assert whole.cached_tokens == (89 // PAGE * PAGE if again else 0), "state without an upper half is no hit"
    rig.replay = BOUNDED
    (after,) = assert_bounded(rig, [[*prompt[:88], *prompt_of(40, 9)]])
    assert after.cached_tokens == 80, "whole state will do as well"
    rig.quiet()


def test_ids_of_the_prompts_end_are_enough(make):
    rig = make(tail=256)
    assert_bounded(rig, [prompt_of(n, 300 + n) for n in (20, 70, 256, 257, 290)], 5)
    rig.quiet()


def test_a_tail_too_short_fails_by_name_and_decodes_nothing(make):
    rig = make(replay=ReplayPolicy(20, 260), tail=256)
    (answer,) = rig.ask([prompt_of(270, 1)], greedy(4))
    assert "260 tokens are left to be computed, of which not all ids are here" in answer.failed
    assert answer.samples == [[]]
    rig.quiet()


@pytest.mark.soak
def test_samples_share_one_replay_and_go_apart(make):
    exact = exact_replay(make.ref.source.config).decoder
    rig = make(replay=ReplayPolicy(exact, exact), chunk=40)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
    for length in (92,):
        prompt = prompt_of(length, 40 + length)
        (expected,) = rig.ref.generate([prompt], params, samples=3)
        (answer,) = rig.ask([prompt], params, samples=3)
        assert answer.samples == [s.ids for s in expected.samples] and len({tuple(s) for s in answer.samples}) == 3
        assert rig.gen.node.loop_stats.replayed_positions == rig.gen.node.loop_stats.prompt_positions
    rig.quiet()


def test_one_token_or_a_first_token_that_ends_it_is_drawn_by_gen_too(make):
    exact = exact_replay(make.ref.source.config).decoder
    rig = make(replay=ReplayPolicy(exact, exact))
    prompt = prompt_of(95, 3)
    (first,) = rig.assert_equal([prompt], 1, share=0)
    assert len(first.samples[0]) == 1 and first.moved is not None
    stop = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(first.samples[0][0],))
    (stopped,) = rig.ask([prompt], stop)
    assert stopped.samples == first.samples and stopped.finished == {0}
    assert rig.ctx.node.loop_stats.output_tokens == 0
    rig.quiet()


def test_a_ctx_that_has_the_lower_half_only_refuses_what_needs_more_and_serves_who_wants_no_token(make):
    rig = make()
    prompt = prompt_of(40, 12)
    (cold,) = assert_bounded(rig, [prompt], 3)
    policy, rig.replay = rig.replay, None  # nothing is left to gen
    (drawn,) = rig.ask([prompt], greedy(3))
    assert "to draw a token needs the upper layers, which are not here" in drawn.failed and drawn.samples == [[]]
    (echo,) = rig.ask([prompt], SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1))
    assert "prompt logprobs need the upper layers, which are not here" in echo.failed
    (nothing,) = rig.ask([prompt], greedy(0))
    assert not nothing.failed and nothing.samples == [[]] and nothing.finished == {0}
    rig.replay = policy
    (warm,) = assert_bounded(rig, [prompt], 3)
    assert warm.samples == cold.samples and warm.cached_tokens > 0
    rig.quiet()


@pytest.mark.parametrize(("length", "sent"), [
    pytest.param(70, 20, id="in the prompt", marks=pytest.mark.soak), pytest.param(10, 90, id="in the output"),
])  # fmt: skip
def test_a_later_attempt_goes_on_where_the_first_was_lost(make, length: int, sent: int):
    """What is handed over ends in the prompt, or in what was sent already; gen goes on with the next token."""
    exact = exact_replay(make.ref.source.config).decoder
    rig = make(replay=ReplayPolicy(exact, exact), chunk=40)
    prompt = prompt_of(length, 8 * length)
    (whole,) = rig.ref.generate([prompt], greedy(sent + 6))
    ids = whole.samples[0].ids
    (answer,) = rig.ask([prompt], greedy(sent + 6), output=ids[:sent])
    assert answer.samples[0] == ids and answer.moved.pages == rig.ref.layout.moved_pages(length + sent - exact)
    rig.quiet()


def test_a_cancel_in_the_middle_of_a_replay_gives_all_pages_back(make):
    rig = make(replay=ReplayPolicy(60, 60), chunk=4)
    step = rig.gen.engine.step

    def cancelled(plan: Any) -> Any:
        rig.gen.engine.step = step
        key = plan.rows[0].key.key
        for name in ("c0", "g0"):
            rig.ingress.send(name, Cancel(*key, "client"))
        rig.ingress.frames.put(("here", Fail(*key, "cancelled", "by the test", False)))
        time.sleep(0.2)
        return step(plan)

    rig.gen.engine.step = cancelled
    (answer,) = rig.ask([prompt_of(130, 4)], greedy(4))
    assert answer.failed and answer.samples == [[]]
    rig.quiet()
    assert 0 < rig.gen.node.loop_stats.replayed_positions < 60


@pytest.mark.soak
def test_penalties_know_the_whole_prompt(make):
    exact = exact_replay(make.ref.source.config).decoder
    rig = make(replay=ReplayPolicy(exact, exact), tail=256)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, repetition_penalty=1.7, logprobs=2)
    prompts = [prompt_of(n, 500 + n) for n in (280, 90)]
    expected = rig.ref.generate(prompts, params)
    answers = rig.ask(prompts, params)
    assert [a.samples[0] for a in answers] == [e.samples[0].ids for e in expected]
    rig.quiet()


@pytest.mark.soak
def test_a15_who_gives_way_is_computed_again_from_the_start(make):
    """All layers of it, so behind the loss its tokens come from an exact state; nothing is asked of ctx again."""
    exact = exact_replay(make.ref.source.config).decoder
    layout = make.ref.layout
    rig = make(replay=ReplayPolicy(exact, exact), chunk=16, gen_pages=2 * layout.num_pages(96) + 2)
    prompts = [prompt_of(n, 70 + n) for n in (88, 91, 92)]
    answers = rig.assert_equal(prompts, 40, share=0.3)
    assert rig.gen.node.loop_stats.preemptions > 0
    assert [a.moved.pages for a in answers] == [layout.moved_pages(n - exact) for n in (88, 91, 92)]
    rig.quiet()


@pytest.mark.soak
def test_many_at_once_in_one_batch(make):
    rig = make(chunk=48, ctx_pages=160, gen_pages=200)
    prompts = [prompt_of(5 + 9 * i, 700 + i) for i in range(7)]
    assert_bounded(rig, prompts, 8, share=0.75)
    rig.quiet()


@pytest.mark.soak
@pytest.mark.parametrize("chunk", [7, 16, 64])
@pytest.mark.parametrize("kind", ["in_process", "shm", "nixl"])
def test_many_lengths_and_chunks(make, kind: str, chunk: int):
    rig, all_of_them = make(kind, chunk=chunk, gen_pages=600), Comparison()
    for n in range(1, 150, 9):
        assert_bounded(rig, [prompt_of(m, 1000 * chunk + m) for m in range(n, n + 9)], among=all_of_them)
    all_of_them.check(0.9)
    rig.quiet()
