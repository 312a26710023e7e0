"""Both loops on the real engine, a copy of the pages between them: tokens equal those of one process that does both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from checkpoints import write_tiny_checkpoint
from device_rig import DEVICES, DeviceReference, device_reference
from loop_fakes import SPACE, FakeNode, prompt_of
from oracle import TOP, Comparison, Reference, compare_greedy, reference

from tailrace.ctx_worker.loop import CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.sampler import margin
from tailrace.engine.step import SamplerState
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.model.grammar_text import grammar_text
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.handoff_record import handoff_record
from tailrace.transfer.loop_events import Admitted, Arrived, Key
from tailrace.transfer.messages import Submit, pack_ids

HASHER = BlockHasher(b"secret", 64)
PAGE = 8


@dataclass
class Pair:
    """A ctx and a gen over the same weights, and REF."""

    ref: Reference
    ctx: Reference | DeviceReference
    gen: Reference | DeviceReference
    ctx_node: FakeNode
    gen_node: FakeNode
    ctx_loop: CtxLoop
    gen_loop: GenLoop
    submits: dict[Key, Submit]

    def submit(
        self, name: str, prompt: list[int], params: SamplingParams, samples: int = 1, leg: str = "prefill", *,
        output: Sequence[int] = (), first_sample: int = 0,
    ) -> Key:  # fmt: skip
        hashes = HASHER.hash_blocks("scope", [*prompt, *output])
        submit = Submit(
            name, 0, leg, pack_ids(prompt), pack_ids(list(output)), params, samples, hashes, SPACE, 0, 5.0, None,
            False, first_sample=first_sample,
        )  # fmt: skip
        node = self.ctx_node if leg == "prefill" else self.gen_node
        node.events.append(Arrived(submit, 0.0))
        self.submits[name, 0] = submit
        return (name, 0)

    def move(self) -> None:
        """What the transfer does: prompts that ctx has prefilled go to gen as soon as it has pages for them."""
        for key in [k for k in self.ctx_node.pinned if k in self.ctx_node.prefilled]:
            result, submit = self.ctx_node.prefilled[key], self.submits[key]
            src = self.ctx_node.pages_at_end[key]
            dst = self.gen.kv.allocate(len(src))
            if dst is None:
                return
            self.gen.pool[dst] = self.ctx.pool[list(src)]
            self.ctx.kv.unpin(self.ctx_node.pinned.pop(key))
            handoff = handoff_record(submit, result, None)
            self.gen_node.events.append(Admitted(handoff, tuple(dst), 0, 0.0))

    def drain(self) -> None:
        idle = 0
        while idle < 3:
            busy = self.ctx_loop.run_pass()
            self.move()
            busy |= self.gen_loop.run_pass()
            idle = 0 if busy or self.gen_node.events or self.ctx_node.pinned else idle + 1

    def output(self, key: Key, sample: int = 0) -> list[int]:
        firsts = self.ctx_node.prefilled[key].firsts if key in self.ctx_node.prefilled else ()
        return [first.token or 0 for first in firsts[sample : sample + 1]] + self.gen_node.output(key, sample)

    def assert_quiet(self) -> None:
        for side in (self.ctx, self.gen):
            assert side.kv.counts().used == 0
            side.kv.check()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Reference] = {}

    def get(family: str, **overrides: object) -> Reference:
        if family not in made:
            directory = write_tiny_checkpoint(root / family, family, **overrides)
            made[family] = reference(directory, tokens_per_page=PAGE)
        return made[family]

    return get


def make_pair(ref: Reference, *, gen_pages: int = 64, chunk: int = 20, device: str | None = None) -> Pair:
    """`device`: both on device engines there, gen launching passes ahead; None: on the CPU's."""
    if device is None:
        ctx = reference(ref.source, weights=ref.weights, tokens_per_page=PAGE)
        gen = reference(ref.source, weights=ref.weights, tokens_per_page=PAGE, num_pages=gen_pages + 1)
    else:
        shapes = {"tokens_per_page": PAGE, "max_num_tokens": chunk, "max_batch_size": 8, "warm": True}
        ctx = device_reference(ref.source, device, **shapes)
        gen = device_reference(ref.source, device, num_pages=gen_pages + 1, **shapes)
    ctx_node, gen_node = FakeNode(ctx.kv, pin=True), FakeNode(gen.kv)
    eos = ref.source.eos_ids
    ahead = None if device is None else gen.engine
    scheduler = DecodeScheduler(
        gen.kv.layout, max_batch_size=8, max_num_tokens=chunk, max_gen_init_admissions_per_pass=2
    )
    return Pair(
        ref,
        ctx,
        gen,
        ctx_node,
        gen_node,
        CtxLoop(ctx.engine, ctx.kv, ctx_node, PrefillScheduler(chunk), eos_ids=eos, grammars=ref.grammars),
        GenLoop(
            gen.engine,
            gen.kv,
            gen_node,
            scheduler,
            PrefillScheduler(chunk),
            eos_ids=eos,
            grammars=ref.grammars,
            run_ahead=ahead,
        ),
        {},
    )


GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=TOP)


def prompts(*lengths: int) -> list[list[int]]:
    return [[t % 500 + 4 for t in prompt_of(length, 7 + length)] for length in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_split_equals_one_process_in_chunks_batches_and_pages(family, models):
    ref = models(family, **({"sliding_window": 24} if family == "mistral" else {}))
    pair = make_pair(ref)
    made = prompts(1, 7, 8, 9, 19, 20, 21, 103)
    keys = [pair.submit(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(made)]
    pair.drain()
    comparison = Comparison()
    for key, expected in zip(keys, ref.generate(made, GREEDY), strict=True):
        comparison.add(expected.samples[0].logprobs, pair.output(key))
    comparison.check()
    assert pair.gen_node.loop_stats.prompt_positions == 0
    pair.assert_quiet()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_giving_way_and_computing_again_does_not_change_a_token(family, models):
    ref = models(family, **({"sliding_window": 24} if family == "mistral" else {}))
    pair = make_pair(ref, gen_pages=9)
    made = prompts(5, 6, 7, 8)
    keys = [pair.submit(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(made)]
    pair.drain()
    comparison = Comparison()
    for key, expected in zip(keys, ref.generate(made, GREEDY), strict=True):
        comparison.add(expected.samples[0].logprobs, pair.output(key))
    comparison.check()
    assert pair.gen_node.loop_stats.preemptions > 0
    pair.assert_quiet()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gen_pages", [64, 9])
def test_both_loops_on_device_engines_give_the_same_tokens(device, gen_pages, models):
    """Hand-offs and local prompts, passes launched ahead; with few pages some give way and are computed again."""
    ref = models("llama")
    pair = make_pair(ref, gen_pages=gen_pages, device=device)
    made = prompts(5, 6, 7, 8, 19)
    params = replace(GREEDY, logprobs=None)
    legs = ("prefill", "prefill", "local", "prefill", "local")
    asked = zip(made, legs, strict=True)
    keys = [pair.submit(f"r{i}", prompt, params, leg=leg) for i, (prompt, leg) in enumerate(asked)]
    pair.drain()
    comparison = Comparison()
    for key, expected in zip(keys, ref.generate(made, GREEDY), strict=True):
        comparison.add(expected.samples[0].logprobs, pair.output(key))
    comparison.check()
    assert (pair.gen_node.loop_stats.preemptions > 0) == (gen_pages == 9)
    pair.assert_quiet()


def test_samples_penalties_and_seeds_survive_the_split_and_local_prefill(models):
    ref = models("llama")
    params = SamplingParams(
        max_tokens=16, temperature=0.8, top_p=0.95, seed=77, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=4
    )
    (prompt,) = prompts(45)
    (expected,) = ref.generate([prompt], [params], samples=3)
    for leg in ("prefill", "local"):
        pair = make_pair(ref)
        key = pair.submit("r", prompt, params, samples=3, leg=leg)
        pair.drain()
        compared = 0
        for sample in range(3):
            ids = expected.samples[sample].ids
            unclear = unclear_positions(ref, prompt, params, sample, ids)
            found = pair.output(key, sample)
            compared += min(unclear | {len(ids)})
            assert found[: min(unclear | {len(ids)})] == ids[: min(unclear | {len(ids)})]
        assert compared >= 0.9 * sum(len(s.ids) for s in expected.samples)
        pair.assert_quiet()
    assert len({tuple(s.ids) for s in expected.samples}) == 3


@pytest.mark.parametrize(("leg", "gen_pages"), [("prefill", 64), ("prefill", 9), ("local", 64)])
def test_grammars_survive_the_split_giving_way_and_local_prefill(leg, gen_pages, models):
    ref = models("llama")
    grammar = grammar_text("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 12})
    params = replace(GREEDY, grammar=grammar, ignore_eos=False, max_tokens=30)
    made = prompts(5, 6, 7, 8)
    expected = ref.generate(made, params, samples=2)  # compiles it, too: here nothing waits
    pair = make_pair(ref, gen_pages=gen_pages)
    keys = [pair.submit(f"r{i}", prompt, params, samples=2, leg=leg) for i, prompt in enumerate(made)]
    pair.drain()
    for key, result in zip(keys, expected, strict=True):
        for sample in range(2):
            ids = pair.output(key, sample)
            assert ids == result.samples[sample].ids and len(ids) > 1
    assert (pair.gen_node.loop_stats.preemptions > 0) == (gen_pages == 9)
    pair.assert_quiet()


def test_a_grammar_that_cannot_be_compiled_fails_its_own_request(models):
    ref = models("llama")
    pair = make_pair(ref)
    good, bad = prompts(9, 11)
    fine = pair.submit("fine", good, GREEDY)
    broken = [pair.submit(f"bad-{leg}", bad, replace(GREEDY, grammar='{"kind":"regex","value":"("}'), leg=leg)
              for leg in ("prefill", "local")]  # fmt: skip
    deadline = time.monotonic() + 20
    while len(pair.ctx_node.fails) + len(pair.gen_node.fails) < 2 and time.monotonic() < deadline:
        pair.drain()
    for key, node in zip(broken, (pair.ctx_node, pair.gen_node), strict=True):
        assert node.fails[key][0] == "grammar" and not node.fails[key][2]
    assert pair.output(fine) == ref.generate([good], GREEDY)[0].ids
    pair.assert_quiet()


def unclear_positions(
    ref: Reference, prompt: list[int], params: SamplingParams, sample: int, ids: list[int]
) -> set[int]:
    """Positions at which the reference's draw lies so near a boundary that noise may flip it."""
    counts = {t: prompt.count(t) for t in set(prompt)}
    state = SamplerState(params, sample, len(prompt), ref.source.eos_ids, counts)
    found = set()
    for at, token in enumerate(ids):
        logits = next_logits(ref, [*prompt, *ids[:at]])
        if not margin(logits, state, len(prompt) + at).clear:
            found.add(at)
        state.observe(token)
    return found


def next_logits(ref: Reference, ids: list[int]) -> torch.Tensor:
    """Logits after `ids`, as the log-softmax that the engine reports for the whole vocabulary."""
    every = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=512)
    (result,) = ref.generate([ids], every)
    row = torch.full((512,), -torch.inf)
    for token, logprob in result.samples[0].logprobs[0].top:
        row[token] = logprob
    return row


def test_an_altered_page_changes_the_output(models):
    """The standing negative control: without it, corrupt pages could hide behind a constant token."""
    ref = models("llama")
    pair = make_pair(ref)
    (prompt,) = prompts(40)
    key = pair.submit("r", prompt, GREEDY)
    while not pair.gen_node.events:
        pair.ctx_loop.run_pass()
        pair.move()
    page = pair.gen_node.events[0].pages[1]
    pair.gen.pool[page, :, 1] *= -1.0  # the values; rows merely reordered would attend alike
    pair.drain()
    (expected,) = ref.generate([prompt], GREEDY)
    with pytest.raises(AssertionError):
        compare_greedy(expected.samples[0].logprobs, pair.output(key))


PENALIZED = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


@pytest.mark.parametrize("leg", ["prefill", "local"])
@pytest.mark.parametrize("more", [{}, PENALIZED], ids=["seeded", "penalized"])
def test_d24_a_sample_goes_on_from_its_ids_as_if_nothing_had_happened_whatever_its_index(leg, more, models):
    """What a resumed attempt asks of the workers: prompt, ids so far, and the index of its one sample."""
    ref = models("llama")
    pair = make_pair(ref)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1234, ignore_eos=True, logprobs=TOP, **more)
    (prompt,) = prompts(37)
    (whole,) = ref.generate([prompt], params, samples=3)
    outputs = [sample.ids for sample in whole.samples]
    assert len({tuple(ids) for ids in outputs}) == 3, "the samples do not differ, so their index proves nothing"
    asked = [(index, cut) for index in range(3) for cut in (1, 7, 19)]
    keys = [
        pair.submit(f"s{index}-{cut}", prompt, params, leg=leg, output=outputs[index][:cut], first_sample=index)
        for index, cut in asked
    ]
    pair.drain()
    for key, (index, cut) in zip(keys, asked, strict=True):
        got = [f.token or 0 for f in pair.ctx_node.prefilled[key].firsts] if leg == "prefill" else []
        assert got + pair.gen_node.output(key, index) == outputs[index][cut:]
    pair.assert_quiet()
