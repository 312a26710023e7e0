"""Draft blocks of DeepSeek V3, V3.2, V4 and V4.1 on the engine and the gen loop: what they guess from is there after
any cut, and what comes out is what plain decoding gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from draft_rig import DraftRig, Side, make_side
from mla_checkpoints import write_knowing_mla, write_tiny_mla
from oracle import Comparison, greedy
from row_steps import RowSequence, RowWorld

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model import mla_mtp
from tailrace.model.csa2_config import parse_config as parse_csa2
from tailrace.model.csa2_drafting import Csa2DraftingDecoder
from tailrace.model.csa_config import parse_config as parse_csa
from tailrace.model.draft_rows import CARRIED, drafting_groups
from tailrace.model.drafting import CsaBlock, DraftingDecoder, MlaBlock
from tailrace.model.errors import ConfigError
from tailrace.model.family import DraftingRowDecoder, Guessed
from tailrace.model.hf_directory import read_json, stored_tensors
from tailrace.model.mla_config import parse_config
from tests.model.csa2_models import DRAFT, PLAIN, knowing_tensors, make_decoder, random_tensors
from tests.model.csa_models import oracle_model, tiny_config, with_draft

PAGES = {"deepseek_v3": 8, "deepseek_v32": 8, "deepseek_v4": 32, "deepseek_v41": 16}
FAMILIES = tuple(PAGES)
CARRYING = FAMILIES[:3]  # V4.1's stages keep windows
DSPARK = DRAFT | {"dspark_markov_rank": DRAFT["hidden_size"]}


def knowing_and_sensitive() -> dict[str, torch.Tensor]:
    """Whatever the stages see changes how sure they are."""
    tensors = knowing_tensors(DSPARK)
    (name,) = (name for name in tensors if name.endswith("confidence_head.proj.weight"))
    tensors[name] = random_tensors(DSPARK)[name]
    tensors[name][:, : DSPARK["hidden_size"]] *= 50
    return tensors


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DraftingRowDecoder]:
    made: dict[str, DraftingRowDecoder] = {}

    def make(family: str) -> DraftingRowDecoder:
        if family == "deepseek_v41":
            return Csa2DraftingDecoder(make_decoder(DSPARK, tensors=knowing_and_sensitive()))
        if family == "deepseek_v4":
            raw = tiny_config("WCHCW")
            return DraftingDecoder(CsaBlock(with_draft(oracle_model(raw), parse_csa(raw, "x"))[0]))
        directory = write_knowing_mla(tmp_path_factory.mktemp(family), family)
        config = parse_config(read_json(directory / "config.json", required=True), "config.json")
        return DraftingDecoder(MlaBlock(*mla_mtp.load(stored_tensors(directory), config, torch.float32, 8)))

    def get(family: str) -> DraftingRowDecoder:
        if family not in made:
            made[family] = make(family)
        return made[family]

    return get


def side_of(decoder: DraftingRowDecoder, family: str) -> Side:
    return make_side(decoder, PAGES[family])


def feed(world: RowWorld, sequence: RowSequence, known: list[int], drafts: list[int]) -> torch.Tensor:
    """States of known tokens and guesses."""
    new = [*known, *drafts]
    positions = torch.arange(sequence.length, sequence.length + len(new))
    span = RowSpan(sequence.length, len(new), sequence.table, len(drafts))
    with torch.inference_mode():
        states = world.decoder.forward(torch.tensor(new), positions, world.pool, [span])
    sequence.length += len(known)
    return states


def guess(world: RowWorld, sequence: RowSequence, states: torch.Tensor, ids: list[int], count: int) -> Guessed:
    decoder = world.decoder
    assert isinstance(decoder, DraftingRowDecoder)
    span = RowSpan(sequence.length, len(ids), sequence.table, len(ids))
    with torch.inference_mode():
        (made,) = decoder.propose(states, torch.tensor(ids), world.pool, [span], [count])
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_do_not_depend_on_how_a_text_was_cut_nor_on_earlier_guesses(decoders, family):
    decoder, rng = decoders(family), random.Random(5)
    ids = [rng.randrange(4, decoder.config.vocab_size) for _ in range(62)]
    whole = RowWorld(decoder, 80)
    for length in (2, 17, 40, 60):
        sequence = whole.sequence(80)
        expected = guess(whole, sequence, feed(whole, sequence, ids[:length], [])[-1:], ids[length : length + 1], 3)
        assert len(expected.tokens) == (1 if family == "deepseek_v4" else 3)
        world = RowWorld(decoder, 40, seed=length)
        sequence = world.sequence(80)
        while sequence.length < length - 1:
            known = ids[sequence.length : min(length - 1, sequence.length + rng.randrange(1, 6))]
            feed(world, sequence, known, [rng.randrange(decoder.config.vocab_size) for _ in range(rng.randrange(4))])
        # The last step: one known token, and one guess that is right and does count.
        right = feed(world, sequence, ids[length - 1 : length], ids[length : length + 1])
        found = guess(world, sequence, right[:1], ids[length : length + 1], 3)
        assert found.tokens == expected.tokens
        assert torch.allclose(torch.tensor(found.chances), torch.tensor(expected.chances), atol=1e-4)
        further = guess(world, sequence, right, ids[length : length + 2], 3)
        state = feed(world, sequence, ids[length : length + 1], [])
        later = guess(world, sequence, state, ids[length + 1 : length + 2], 3)
        assert further.tokens == later.tokens
        assert torch.allclose(torch.tensor(further.chances), torch.tensor(later.chances), atol=1e-4)


@pytest.mark.parametrize("family", CARRYING)
def test_the_state_in_front_of_a_chunk_matters(decoders, family):
    decoder, rng = decoders(family), random.Random(6)
    ids = [rng.randrange(4, decoder.config.vocab_size) for _ in range(24)]
    pages = []
    for is_lost in (False, True):
        world = RowWorld(decoder, 40)
        sequence = world.sequence(40)
        feed(world, sequence, ids[:21], [])
        if is_lost:
            row = world.pool.of(sequence.table).state(CARRIED, 0)
            row.write(torch.zeros(1, dtype=torch.int64), torch.zeros(1, row.row_bytes, dtype=torch.uint8))
        feed(world, sequence, ids[21:23], [])  # the row has been overwritten: what differs is what was made of it
        pages.append(world.pool.pages[sequence.table])
    assert not torch.equal(*pages)


@pytest.mark.parametrize("family", [*CARRYING, pytest.param("deepseek_v41", marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_drafts", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_output_with_the_blocks_guesses_is_that_of_plain_decoding(decoders, family, num_drafts):
    side, rng = side_of(decoders(family), family), random.Random(3)
    prompts = [[rng.randrange(4, side.vocab_size) for _ in range(n)] for n in (7, 21)]
    plain = side.generate(prompts, greedy(66))
    rig = DraftRig(side, None, num_drafts=num_drafts)
    keys = [rig.ask(str(i), p, greedy(66), [r.ids]) for i, (p, r) in enumerate(zip(prompts, plain, strict=True))]
    rig.drain()
    comparison = Comparison()
    for key, result in zip(keys, plain, strict=True):
        comparison.add(result.samples[0].logprobs, rig.output(key))
    comparison.check(0.5)
    stats = rig.node.loop_stats
    assert stats.drafts_verified > 40
    if family != "deepseek_v4":  # its random block knows nothing
        assert stats.drafts_accepted > 20


def test_guesses_end_where_the_pages_do(decoders):
    decoder = decoders("deepseek_v3")
    world = RowWorld(decoder, 40)
    sequence = world.sequence(16)
    states = feed(world, sequence, list(range(5, 18)), [])
    assert [len(guess(world, sequence, states[-1:], [9], count).tokens) for count in (0, 2, 3, 9)] == [0, 2, 3, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_alone_says_what_a_sequence_keeps(decoders, family):
    assert drafting_groups(decoders(family).config, "float32") == decoders(family).layout.groups


def test_models_without_a_block_that_is_served_are_refused(tmp_path):
    config = parse_config(read_json(write_tiny_mla(tmp_path, "deepseek_v3") / "config.json", required=True), "x")
    with pytest.raises(ConfigError, match="has no draft block"):
        drafting_groups(config, "float32")
    with pytest.raises(ConfigError, match="the checkpoint has no draft stages"):
        drafting_groups(parse_csa2(PLAIN, "x"), "float32")
