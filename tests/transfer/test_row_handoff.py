"""Prefilled on one worker, moved, decoded on another, for a family with every kind of row: real loops and transports.

In make test the family is row_family.py's (HISTORY of two ratios, WINDOW, CARRY, TAIL and TOKENS, each of which changes
tokens when it is lost: tests/engine/test_row_families.py), in make soak the real ones too. Freed pages are poisoned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equal import prompt_of
from oracle import Comparison, Reference, greedy, reference
from row_family import write_row_checkpoint
from row_rig import RowRig
from tiny_families import FAMILIES, RATIOS, WINDOWS, write_tiny_family

from tailrace.model.errors import PairRefused
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer import reservation
from tailrace.transfer.bitmap import UnitBitmap
from tailrace.transfer.pairing import conversion_between, mismatch

MODELS = ("tiny_rows", *(pytest.param(family, marks=pytest.mark.soak) for family in FAMILIES))


@pytest.fixture(scope="module", params=MODELS)
def ref(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield model(request.param, tmp_path_factory.mktemp("rows"))
    torch.set_num_threads(before)


def model(name: str, path: Path) -> Reference:
    page = 8 if name == "tiny_rows" else 16
    directory = write_row_checkpoint(path) if name == "tiny_rows" else write_tiny_family(path, name)
    return reference(directory, tokens_per_page=page, block_tokens=page, num_pages=1000)


def borders(ref: Reference) -> list[int]:
    """Lengths before, at and after whatever period the family has, and the usual ones."""
    groups = ref.layout.groups
    periods = {ref.layout.tokens_per_page, *(g.tokens_per_row for g in groups), *(g.rows for g in groups if g.rows > 3)}
    found = {n for period in periods for n in (period - 1, period, period + 1) if n}
    return sorted({1, *found, 63, 64, 79, 80, 127, 128, 129})


@pytest.fixture
def make(ref: Reference) -> Iterator[Callable[..., RowRig]]:
    rigs: list[RowRig] = []

    def of(kind: str = "shm", **options: Any) -> RowRig:
        if kind == "nixl":
            pytest.importorskip("nixl")
        rigs.append(RowRig(ref, kind, **options))
        return rigs[-1]

    of.ref = ref  # type: ignore[attr-defined]
    yield of
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize(("kind", "verify"), [("in_process", False), ("shm", True), ("nixl", False)])
def test_answers_are_those_of_one_process_after_every_length(make, kind: str, verify: bool):
    rig = make(kind, chunk=20, verify=verify)
    layout, lengths = rig.ref.layout, borders(rig.ref)
    answers = rig.assert_equal([prompt_of(n, 100 + n) for n in lengths])
    for n, answer in zip(lengths, answers, strict=True):
        moved = answer.moved
        assert moved.pages == layout.moved_pages(n) and moved.pages_skipped == 0 and moved.verified == verify
        assert moved.logical_bytes == layout.moved_pages(n) * layout.bytes_per_page
    assert rig.gen.node.loop_stats.prompt_positions == 0
    metric = rig.gen.node.metrics.value("tailrace_transfer_bytes_total", kind="logical", transport=kind, codec="raw")
    assert metric == sum(layout.moved_pages(n) for n in lengths) * layout.bytes_per_page
    rig.quiet()


@pytest.mark.soak
@pytest.mark.parametrize("chunk", [7, 16, 64])
@pytest.mark.parametrize("kind", ["in_process", "shm", "nixl"])
def test_many_lengths_and_chunks(make, kind: str, chunk: int):
    rig, all_of_them = make(kind, chunk=chunk, gen_pages=600), Comparison()
    for n in range(1, 200, 9):
        rig.assert_equal([prompt_of(m, 1000 * chunk + m) for m in range(n, n + 9)], 12, among=all_of_them)
    all_of_them.check(0.9)
    rig.quiet()


def test_a5_pages_that_gen_holds_are_not_sent_again_and_the_state_always_is(make):
    """k pages are warm on gen (none, one, all but one, all); prompts end before, at and after a page's end."""
    rig, full, seed = make(), 4, 0
    layout, page = rig.ref.layout, rig.ref.layout.tokens_per_page
    for warm in (0, 1, full - 1, full):
        for length in (full * page - 1, full * page, full * page + 1):
            seed += 1
            prompt = prompt_of(length, 300 + seed)
            if warm:
                rig.assert_equal([prompt[: warm * page]])
            (answer,) = rig.assert_equal([prompt])
            skipped = min(warm, length // page)
            assert answer.moved.pages == layout.moved_pages(length) - skipped, (warm, length)
            assert answer.moved.pages_skipped == skipped
            assert answer.moved.logical_bytes == (layout.moved_pages(length) - skipped) * layout.bytes_per_page
    rig.quiet()


def test_without_its_state_pages_a_hit_on_the_whole_history_is_wrong(make, monkeypatch: pytest.MonkeyPatch):
    """What the test above would not see if the state did not matter: suppress it, and the answer changes or fails."""
    rig = make()
    if not rig.ref.layout.num_state_pages:
        pytest.skip("all that this family keeps grows with the prompt")
    prompt = prompt_of(4 * rig.ref.layout.tokens_per_page, 17)
    rig.assert_equal([prompt])
    honest = reservation.reserve

    def suppressed(*args: Any) -> Any:
        hand = honest(*args)
        missing = hand.units.missing()
        hand.units = UnitBitmap([u for u in missing if u.ordinal < 4])  # a hit on HISTORY hides what is missing else
        hand.num_state_units = 0
        return hand

    monkeypatch.setattr("tailrace.transfer.gen_core.reserve", suppressed)
    with pytest.raises(AssertionError):
        rig.assert_equal([prompt])


def test_a_hit_on_a_snapshot_answers_as_a_cold_run_and_counts_what_was_cached(make):
    rig = make(chunk=20)
    prompt = prompt_of(61, 5)
    (cold,) = rig.assert_equal([prompt])
    assert cold.cached_tokens == 0
    (warm,) = rig.assert_equal([prompt])
    page, has_state = rig.ref.layout.tokens_per_page, bool(rig.ref.layout.num_state_pages)
    kept = 60 // page * page
    assert warm.cached_tokens == kept and warm.samples == cold.samples
    (longer,) = rig.assert_equal([[*prompt, *prompt_of(30, 6)]])
    assert longer.cached_tokens == kept
    (shorter,) = rig.assert_equal([[*prompt[:40], *prompt_of(9, 7)]])
    shared = 0 if has_state else 40 // page * page
    assert shorter.cached_tokens == shared, "history without the state at its end is no hit"
    assert rig.ctx.node.loop_stats.prefix_hit_tokens == 2 * kept + shared
    if has_state:  # that others share this beginning has shown now, so its state was kept
        (third,) = rig.assert_equal([[*prompt[:40], *prompt_of(12, 8)]])
        assert third.cached_tokens == 40 // page * page
    (unasked,) = rig.ask([prompt], greedy(10), no_cache=True)
    assert unasked.cached_tokens == 0 and unasked.samples == cold.samples
    rig.quiet()


def test_a_turn_that_goes_on_from_a_long_prompt_is_prefilled_from_its_snapshot(make):
    rig = make(chunk=32)
    prompt, cached = prompt_of(90, 8), 0
    for turn in range(3):
        (answer,) = rig.assert_equal([prompt])
        assert answer.cached_tokens == cached
        cached = (len(prompt) - 1) // rig.block * rig.block
        prompt = [*prompt, *answer.samples[0], *prompt_of(11, 60 + turn)]
    rig.quiet()


def test_local_prefill_keeps_and_finds_snapshots_too(make):
    rig = make(chunk=24)
    prompt = prompt_of(61, 9)
    (cold,) = rig.assert_equal([prompt], leg="local")
    (warm,) = rig.assert_equal([prompt], leg="local")
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 60 // rig.block * rig.block)
    (handed,) = rig.assert_equal([prompt])
    skipped = 61 // rig.block
    assert (handed.moved.pages, handed.moved.pages_skipped) == (rig.ref.layout.moved_pages(61) - skipped, skipped)
    rig.quiet()


@pytest.mark.parametrize("leg", ["prefill", "local"])
def test_samples_share_one_transfer_and_go_apart(make, leg: str):
    rig = make(chunk=20)
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=11, ignore_eos=True)
    for length in (7, 8, 33):
        prompt = prompt_of(length, 40 + length)
        (expected,) = rig.ref.generate([prompt], params, samples=3)
        (answer,) = rig.ask([prompt], params, samples=3, leg=leg)
        assert answer.samples == [s.ids for s in expected.samples] and len({tuple(s) for s in answer.samples}) == 3
    rig.quiet()


def test_a15_giving_way_computes_again_and_changes_no_token(make):
    layout = make.ref.layout
    rig = make(chunk=16, gen_pages=2 * layout.num_pages(84) - 2)
    prompts = [prompt_of(n, 70 + n) for n in (21, 22, 23, 24)]
    answers = rig.assert_equal(prompts, 60, share=0.6)  # a near tie early in a long answer ends its comparison
    assert rig.gen.node.loop_stats.preemptions > 0 and rig.gen.node.loop_stats.recomputed_positions > 0
    assert [a.moved.pages for a in answers] == [rig.ref.layout.moved_pages(n) for n in (21, 22, 23, 24)]
    rig.quiet()


def test_a11_chunks_that_end_inside_a_page_are_sent_once_in_their_final_state(make):
    rig = make(chunk=5)
    lengths = (50, 61, 6 * 5)
    answers = rig.assert_equal([prompt_of(n, 90 + n) for n in lengths])
    assert [a.moved.pages for a in answers] == [rig.ref.layout.moved_pages(n) for n in lengths]
    rig.quiet()


@pytest.mark.parametrize("kind", ["shm", pytest.param("nixl", marks=pytest.mark.soak)])
def test_a25_probes_stay_right_among_many_mixed_requests(make, kind: str):
    rig = make(kind, chunk=48, ctx_pages=120, gen_pages=160)
    rng = np.random.default_rng(25)
    probe = prompt_of(43, 25)
    prefixes = [prompt_of(40, 400 + i) for i in range(4)]
    for batch in range(3):
        prompts = [
            [*prefixes[rng.integers(4)][: rng.integers(41)], *prompt_of(int(rng.integers(1, 40)), 1000 * batch + i)]
            for i in range(7)
        ]
        rig.assert_equal([*prompts, probe], int(rng.integers(3, 14)), share=0.75)
    assert rig.ctx.node.loop_stats.prefix_hit_tokens > 0
    rig.quiet()


def test_pairs_whose_pages_differ_are_refused_with_field_and_both_values(make):
    rig = make()
    compat = rig.ctx.node.config.compat
    assert mismatch(compat, compat) is None and conversion_between(compat, compat, landing=True) is None
    group = compat.groups[0]
    others = {
        "tokens_per_page": (replace(compat, tokens_per_page=64), 64),
        "dtype": (replace(compat, dtype="bfloat16"), "bfloat16"),
        "tp": (replace(compat, tp=2), 2),
        "page_bytes": (replace(compat, page_bytes=(1,)), (1,)),
        "codecs": (replace(compat, codecs=("int8", "raw")), ("int8", "raw")),
    }
    for field, (other, value) in others.items():
        refused = mismatch(replace(compat, codecs=("int8", "raw")) if field == "codecs" else compat, other)
        assert isinstance(refused, PairRefused) and refused.field == field and refused.theirs == value
    changed = replace(group, layers=((0, "history 3/0/0 layers 0: other"), *group.layers[1:]))
    refused = mismatch(compat, replace(compat, groups=(changed,)))
    assert refused is not None and refused.field == "groups[0] layers 0" and group.layers[0][1] in str(refused)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("v32", "shm"), ("v4", "nixl"), ("v41-engram", "shm")],
)
def test_real_families_answer_as_one_process_does(tmp_path: Path, family: str, kind: str):
    """The whole product of lengths, transports and chunks is in make soak."""
    if kind == "nixl":
        pytest.importorskip("nixl")
    torch.set_num_threads(1)
    ref = model(family, tmp_path)
    lengths = sorted({1, WINDOWS.get(family, 16) + 1, 63, *(r + 1 for r in RATIOS[family])})
    with RowRig(ref, kind, chunk=40) as rig:
        answers = rig.assert_equal([prompt_of(n, 100 + n) for n in lengths], 7)
        assert [a.moved.pages for a in answers] == [ref.layout.moved_pages(n) for n in lengths]
        (warm,) = rig.assert_equal([prompt_of(63, 163)], 7)
        assert (warm.cached_tokens, warm.moved.pages_skipped) == (48, 3)
        rig.quiet()


@pytest.mark.parametrize(("family", "kind"), [("v4", "shm"), ("v41", "nixl")])
def test_a10_slow_chunks_beside_a_fast_transfer_are_sent_when_their_forward_has_returned(
    tmp_path: Path, family: str, kind: str
):
    """Six chunks, each slow before and behind its forward; what decides the answer stands in the first, third or last.
    Gen reads history while ctx computes on; the state, which every chunk overwrites, only behind the last."""
    if kind == "nixl":
        pytest.importorskip("nixl")
    torch.set_num_threads(1)
    ref, chunk = model(family, tmp_path), 16
    prompt = prompt_of(6 * chunk - 3, 10)
    places = (3, 2 * chunk + 5, 5 * chunk + 9)
    prompts = [[*prompt[:at], (prompt[at] + 7) % 200 + 10, *prompt[at + 1 :]] for at in places]
    with RowRig(ref, kind, chunk=chunk) as rig:
        log: list[str] = []
        step, tell, metrics = rig.ctx.engine.step, rig.ctx.node.chunk_done, rig.gen.node.metrics
        labels = {"kind": "logical", "transport": kind, "codec": "raw"}

        def slowly(plan: Any) -> Any:
            if len(plan.rows[0].ids) != 1:
                log.append(f"launched, {metrics.value('tailrace_transfer_bytes_total', **labels):.0f} bytes here")
            time.sleep(0.06)
            results = step(plan)
            time.sleep(0.06)
            log.append("returned")
            return results

        def told(*args: Any) -> None:
            log.append("told")
            tell(*args)

        rig.ctx.engine.step, rig.ctx.node.chunk_done = slowly, told  # type: ignore[method-assign]
        answers, before = [], 0.0
        for one in prompts:
            log.clear()
            answers += rig.assert_equal([one], 8, share=0.7)
            assert [word.split(",")[0] for word in log] == ["launched", "returned", "told"] * (len(log) // 3)
            bytes_here = [float(word.split()[1]) for word in log if word.startswith("launched")]
            assert len(bytes_here) >= 4, "a prefix may be found, the chunks behind it are slow"
            assert bytes_here[-1] > before, "history was read while ctx computed"
            before = metrics.value("tailrace_transfer_bytes_total", **labels)
            assert before - bytes_here[-1] >= ref.layout.num_state_pages * ref.layout.bytes_per_page // 2
        assert len({tuple(a.samples[0]) for a in answers}) == 3, "each of the three tokens decides"
        rig.quiet()
