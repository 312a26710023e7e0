"""DeepSeek V4's draft block: its guesses, and that guessing never changes what comes out.

A step takes the last certain token and a guess of the one behind it. If the guess was wrong the next step starts before
it: whatever it closed, opened or carried over is as if it had never been there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa_config import parse_config
from tailrace.model.csa_decoder import CsaDecoder
from tailrace.model.errors import ConfigError
from tests.model.csa_models import (
    KINDS,
    Held,
    Pages,
    oracle_model,
    run,
    some_ids,
    stable_topk,
    tiny_config,
    with_draft,
)

STEPS = 22


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drafting(layers: str, **overrides: Any) -> tuple[Any, CsaDecoder, dict[str, torch.Tensor]]:
    raw = tiny_config(layers + "W", **overrides)
    oracle = oracle_model(raw)
    return oracle, *with_draft(oracle, parse_config(raw, "x"))


@pytest.fixture(scope="module")
def model() -> tuple[Any, CsaDecoder, dict[str, torch.Tensor]]:
    return drafting("WCHC", compress_rates={KINDS["C"]: 4, KINDS["H"]: 16})


class Speculating:
    """One sequence, greedy, around the decoder's calls. `guess`: (position, the draft's own guess) -> a guess.

    logits: of every certain token from the prompt's last one on.
    """

    def __init__(self, decoder: CsaDecoder, room: int, guess: Callable[[int, int], int]) -> None:
        self.decoder, self.guess, self.pages = decoder, guess, Pages(decoder.layout)
        self.sequence = self.pages.sequence(room)
        self.accepted = self.steps = 0
        self.logits: list[torch.Tensor] = []

    @torch.inference_mode()
    def _target(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(streams, logits behind each token); the sequence's length is left as it is."""
        at = self._span(self.sequence.length, len(ids))
        streams = self.decoder.streams(torch.tensor(ids), at[0], self.pages.pool, at[1])
        return streams, self.decoder.logits(self.decoder.finish(streams))

    @torch.inference_mode()
    def _drafted(self, streams: torch.Tensor, next_ids: list[int], start: int) -> int:
        at = self._span(start, len(next_ids))
        hidden = self.decoder.draft(streams, torch.tensor(next_ids), at[0], self.pages.pool, at[1])
        return int(self.decoder.logits(hidden[-1:]).argmax())

    def _span(self, start: int, count: int) -> tuple[torch.Tensor, list[RowSpan]]:
        return torch.arange(start, start + count), [RowSpan(start, count, self.sequence.table)]

    def generate(self, prompt: list[int], count: int) -> list[int]:
        streams, logits = self._target(prompt)
        self.logits.append(logits[-1:])
        out = [int(logits[-1].argmax())]
        draft = self._drafted(streams, [*prompt[1:], out[0]], 0)
        self.sequence.length = len(prompt)
        while len(out) < count:
            start = self.sequence.length
            guess = self.guess(start + 1, draft)
            streams, logits = self._target([out[-1], guess])
            choices = logits.argmax(-1).tolist()
            new = choices[:2] if choices[0] == guess else choices[:1]
            self.logits.append(logits[: len(new)])
            out += new
            draft = self._drafted(streams[: len(new)], new, start)
            self.sequence.length = start + len(new)
            self.steps += 1
            self.accepted += len(new) - 1
        return out[:count]


def plain(decoder: CsaDecoder, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """(tokens, logits that each was chosen from), of a model that is handed one token a step."""
    pages = Pages(decoder.layout)
    sequence = pages.sequence(len(prompt) + count)
    logits, out = [run(decoder, pages, [(sequence, prompt)])[-1:]], []
    for _ in range(count):
        out.append(int(logits[-1].argmax()))
        logits.append(run(decoder, pages, [(sequence, out[-1:])]))
    return out, torch.cat(logits[:-1])


def same(speculating: Speculating, prompt: list[int], expected: tuple[list[int], torch.Tensor]) -> None:
    """Tokens equal, logits near: a wrong state may well give the same tokens for a while."""
    tokens, logits = expected
    assert speculating.generate(prompt, len(tokens)) == tokens
    assert (torch.cat(speculating.logits)[: len(tokens)] - logits).abs().max() < 1e-4


@pytest.mark.parametrize("length", [1, 15])
def test_speculative_output_is_plain_greedy_output_whichever_guesses_are_right(model, length: int):
    _, decoder, _ = model
    prompt = some_ids(length, seed=length)
    expected = plain(decoder, prompt, STEPS)
    assert len(set(expected[0])) > 5
    text = [*prompt, *expected[0], 0, 0]
    rng = torch.Generator().manual_seed(length)
    coin = torch.rand(len(text) + 2, generator=rng) < 0.5
    guesses: dict[str, Callable[[int, int], int]] = {
        "draft": lambda position, draft: draft,
        "right": lambda position, draft: text[position],
        "wrong": lambda position, draft: (text[position] + 1) % 96,
        "mixed": lambda position, draft: text[position] if coin[position] else (text[position] + 7) % 96,
    }
    for name, guess in guesses.items():
        speculating = Speculating(decoder, len(prompt) + STEPS + 2, guess)
        same(speculating, prompt, expected)
        share = speculating.accepted / speculating.steps
        assert {"right": share == 1, "wrong": share == 0, "mixed": 0.1 < share < 0.9}.get(name, True)


@pytest.mark.parametrize("layers", ["HH", "CC"])
def test_long_runs_of_guesses_over_many_windows(layers: str):
    """Every place in a window where a guess can be taken back, for each kind of layer alone."""
    _, decoder, _ = drafting(layers, sliding_window=4, compress_rates={KINDS["C"]: 2, KINDS["H"]: 8}, index_topk=64)
    prompt = some_ids(5)
    expected = plain(decoder, prompt, 40)
    text = [*prompt, *expected[0], 0, 0]
    for period in (2, 3):
        speculating = Speculating(decoder, 60, lambda p, _, every=period: text[p] if p % every else (text[p] + 1) % 96)
        same(speculating, prompt, expected)
        assert 0 < speculating.accepted < speculating.steps


@pytest.mark.parametrize("length", [7, 12, 15, 31])
def test_the_last_token_of_a_long_chunk_can_be_taken_back(model, length: int):
    _, decoder, _ = model
    ids, found = some_ids(length + 6), []
    for wrong in ([], [5]):
        pages = Pages(decoder.layout)
        sequence = pages.sequence(64)
        run(decoder, pages, [(sequence, ids[:length] + wrong)])
        sequence.length = length
        found.append(torch.cat([run(decoder, pages, [(sequence, [i])]) for i in ids[length:]]))
    assert (found[0] - found[1]).abs().max() < 1e-4


def test_the_drafts_logits_are_the_oracles(model):
    """The oracle's own modules around its last layer: it has no draft block, but all of its parts."""
    oracle, decoder, ends = model
    ids, follower = some_ids(60), 9
    collected: list[torch.Tensor] = []
    last = oracle.model.layers[-1]
    handle = last.register_forward_pre_hook(lambda _, args, kwargs: collected.append(args[0]), with_kwargs=True)
    with torch.inference_mode(), stable_topk():
        oracle(torch.tensor([ids]), use_cache=False)
        handle.remove()
        streams = collected[0]
        next_ids = torch.tensor([[*ids[1:], follower]])
        norm = {n: lambda x, w=ends[f"{n}.weight"]: functional.rms_norm(x, x.shape[-1:], w, 1e-6)
                for n in ("enorm", "hnorm", "norm")}  # fmt: skip
        embedded = norm["enorm"](oracle.model.embed_tokens(next_ids)) @ ends["e_proj.weight"].T
        joined = embedded[:, :, None] + norm["hnorm"](streams) @ ends["h_proj.weight"].T
        given: dict[str, Any] = {}
        handle = last.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
        oracle(torch.tensor([ids]), use_cache=False)
        handle.remove()
        behind = last(joined, **given | {"input_ids": next_ids})
        head = oracle.model.hc_head
        for name in ("hc_fn", "hc_base", "hc_scale"):
            getattr(head, name).data = ends[name.replace("hc_", "hc_head_")]
        expected = oracle.lm_head(norm["norm"](head(behind)))[0]
    speculating = Speculating(decoder, 64, lambda *_: 0)
    found = []
    for start, end in ((0, 25), (25, 26), (26, 60)):  # its window goes on from chunk to chunk
        at = torch.arange(start, end), [RowSpan(start, end - start, speculating.sequence.table)]
        with torch.inference_mode():
            mine = decoder.streams(torch.tensor(ids[start:end]), at[0], speculating.pages.pool, at[1])
            hidden = decoder.draft(mine, next_ids[0, start:end], at[0], speculating.pages.pool, at[1])
            found.append(decoder.logits(hidden))
    assert (torch.cat(found) - expected).abs().max() < 1e-4


def test_a_draft_costs_a_window_and_a_second_length_of_what_is_open(model):
    _, decoder, _ = model
    config = decoder.config
    without = dataclasses.replace(config, num_draft_layers=0)
    sizes = [{f.name: g.rows for g in c.row_groups("bfloat16") for f in g.fields if g.rows} for c in (without, config)]
    assert sizes == [
        {"window": 8, "csa_overlap": 4, "csa_key_overlap": 4, "csa_open": 3, "csa_key_open": 3, "hca_open": 1},
        {"window": 8, "csa_overlap": 8, "csa_key_overlap": 8, "csa_open": 4, "csa_key_open": 4, "hca_open": 2},
    ]
    windows = [g for g in config.row_groups("bfloat16") if g.fields[0].name == "window"]
    assert windows[0].layers == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="2 draft layers.*has 1"):
        dataclasses.replace(config, num_draft_layers=2)


def test_a_moved_sequence_goes_on_drafting(model):
    """The draft's window is a window like the others: a hand-off takes it along."""
    _, decoder, _ = model
    prompt = some_ids(21)
    stayed = Speculating(decoder, 64, lambda _, draft: draft)
    with torch.inference_mode():
        streams, logits = stayed._target(prompt)
        first = int(logits[-1].argmax())
        stayed._drafted(streams, [*prompt[1:], first], 0)
    stayed.sequence.length = len(prompt)
    target = Pages(decoder.layout, seed=5)
    moved = target.moved(stayed.pages, stayed.sequence, 64)
    drafts = []
    for pages, sequence in ((stayed.pages, stayed.sequence), (target, moved)):
        drafts.append(_next_draft(decoder, pages, sequence, first))
    assert torch.equal(*drafts)


@torch.inference_mode()
def _next_draft(decoder: CsaDecoder, pages: Pages, sequence: Held, token: int) -> torch.Tensor:
    at = torch.tensor([sequence.length]), [RowSpan(sequence.length, 1, sequence.table)]
    streams = decoder.streams(torch.tensor([token]), at[0], pages.pool, at[1])
    chosen = decoder.logits(decoder.finish(streams)).argmax(-1)
    return decoder.logits(decoder.draft(streams, chosen, at[0], pages.pool, at[1]))
