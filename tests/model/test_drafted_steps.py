"""Steps whose last tokens are guesses: whatever was guessed, nothing of it is there in the next step.

Each family's tiny model takes one text token by token, and again in steps of known tokens and guesses, right, wrong or
right at first. Logits of all known and all rightly guessed tokens are the same. Steps are random, so that guesses stand
across page ends, window wraps, and ends of compressed windows that they alone close.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mla_checkpoints import write_tiny_mla
from row_steps import RowSequence, RowWorld

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model import mla_decoder
from tailrace.model.family import RowDecoder
from tailrace.model.hf_directory import read_json, stored_tensors
from tailrace.model.mla_config import parse_config
from tests.model.csa2_models import ENGRAM, make_decoder
from tests.model.csa_models import tiny_v4

LENGTH, PROMPT = 80, 6
TOLERANCE = 1e-4
FAMILIES = ("deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RowDecoder]:
    made: dict[str, RowDecoder] = {}

    def make(family: str) -> RowDecoder:
        if family == "deepseek_v4":
            return tiny_v4("WCHC")[1]
        if family == "deepseek_v41":
            return make_decoder(ENGRAM)
        directory: Path = write_tiny_mla(tmp_path_factory.mktemp(family), family)
        config = parse_config(read_json(directory / "config.json", required=True), "config.json")
        return mla_decoder.load(stored_tensors(directory), config, torch.float32, 8)

    def get(family: str) -> RowDecoder:
        if family not in made:
            made[family] = make(family)
        return made[family]

    return get


def step(world: RowWorld, sequence: RowSequence, known: list[int], drafts: list[int]) -> torch.Tensor:
    """Logits of known tokens and guesses; only the former count."""
    new = [*known, *drafts]
    positions = torch.arange(sequence.length, sequence.length + len(new))
    span = RowSpan(sequence.length, len(new), sequence.table, len(drafts))
    with torch.inference_mode():
        logits = world.decoder.logits(world.decoder.forward(torch.tensor(new), positions, world.pool, [span]))
    sequence.length += len(known)
    return logits


def some_drafts(rng: random.Random, following: list[int], vocab: int) -> tuple[list[int], int]:
    """Guesses, and how many of them are right."""
    count = min(rng.randrange(7), len(following))
    right = min(rng.choice((0, 0, 1, 2, count)), count)
    return [*following[:right], *(rng.randrange(vocab) for _ in range(count - right))], right


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_leave_nothing_behind(decoders, family):
    decoder, rng = decoders(family), random.Random(family)
    vocab = decoder.config.vocab_size
    ids = [rng.randrange(4, vocab) for _ in range(LENGTH)]
    plain = RowWorld(decoder, 40)
    sequence = plain.sequence(LENGTH)
    expected = torch.cat([plain.step((sequence, [token])) for token in ids])
    for seed in range(1):
        rng = random.Random(f"{family}{seed}")
        world = RowWorld(decoder, 40, seed=seed)
        sequence = world.sequence(LENGTH + 8)
        far = (step(world, sequence, ids[:PROMPT], []) - expected[:PROMPT]).abs().max()
        while (at := sequence.length) < LENGTH:
            known = ids[at : at + rng.randrange(1, 5)]
            drafts, right = some_drafts(rng, ids[at + len(known) :], vocab)
            logits = step(world, sequence, known, drafts)[: len(known) + right]
            far = max(far, (logits - expected[at : at + len(logits)]).abs().max())
        assert far < TOLERANCE, f"logits are {far} away"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbour_is_not_touched(decoders, family):
    """Pages of another sequence are bit for bit what they were, and so are its logits beside guesses."""
    decoder, rng = decoders(family), random.Random(7)
    ids = [rng.randrange(4, decoder.config.vocab_size) for _ in range(40)]
    world = RowWorld(decoder, 40)
    other, guessed = world.sequence(60), world.sequence(60)
    world.step((other, ids[:21]), (guessed, ids[:21]))
    before = world.pool.pages[other.table].clone()
    step(world, guessed, ids[21:22], ids[30:36])
    assert torch.equal(world.pool.pages[other.table], before)
    scratch = world.pool.pages[0].clone()
    both = torch.tensor([ids[22], ids[23], *ids[30:35], ids[22]])
    spans = [RowSpan(22, 7, guessed.table, 5), RowSpan(21, 1, other.table)]
    with torch.inference_mode():
        positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.start + s.num_new) for s in spans]))
        decoder.forward(both, positions, world.pool, spans)
    assert torch.equal(world.pool.pages[0], scratch)
