"""V3's draft block: its guesses against transformers, and greedy decoding with drafts against plain greedy decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mla_checkpoints import write_tiny_mla
from row_steps import RowWorld
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model import mla_mtp
from tailrace.model.draft_rows import num_accepted
from tailrace.model.errors import ConfigError
from tailrace.model.hf_directory import read_json, stored_tensors
from tailrace.model.mla_config import parse_config
from tailrace.model.mla_decoder import MlaDecoder
from tailrace.model.mla_mtp import DraftedGreedy, MlaDrafter

FAMILIES = ("deepseek_v3", "deepseek_v32")
PROMPT, NEW = 21, 24


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path) -> tuple[MlaDecoder, MlaDrafter]:
    config = parse_config(read_json(directory / "config.json", required=True), "config.json")
    return mla_mtp.load(stored_tensors(directory), config, torch.float32, 8)


def some_ids(count: int, seed: int = 3) -> list[int]:
    return torch.randint(4, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafting(directory: Path, family: str, strength: float) -> Path:
    """A checkpoint whose draft block knows the model's word after a token, if only that token mattered.

    strength: what attention and MLPs of the model add, times this. At 0 the next word hangs on the last token alone.
    """
    write_tiny_mla(directory, family, num_nextn_predict_layers=1)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.0 if name.startswith("model.layers.3.") else strength
    tensors["model.layers.3.enorm.weight"] = torch.ones(64)
    tensors["model.layers.3.eh_proj.weight"] = torch.cat((torch.eye(64), torch.zeros(64, 64)), 1)
    tensors["model.layers.3.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def plain_greedy(decoder: MlaDecoder, ids: list[int], count: int) -> list[int]:
    world = RowWorld(decoder, 20)
    sequence = world.sequence(len(ids) + count)
    found = [int(world.step((sequence, ids))[-1].argmax())]
    while len(found) < count:
        found.append(int(world.step((sequence, found[-1:]))[-1].argmax()))
    return found


def drafted_greedy(greedy: DraftedGreedy, ids: list[int], count: int, chunk: int = 8) -> list[int]:
    with torch.inference_mode():
        found = [greedy.prefill(ids, chunk)]
        while len(found) < count:
            found += greedy.step()
    return found[:count]


def test_guesses_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = write_tiny_mla(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\."])
    main = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    oracle = MtpModel.from_pretrained(main).eval()
    ids = some_ids(41)
    with torch.inference_mode():
        hidden = main.model(torch.tensor([ids[:40]])).last_hidden_state
        expected = oracle._project_to_logits(
            oracle.forward_layer(
                0,
                hidden,
                torch.arange(1, 41)[None],
                MtpCache(config=main.config.get_mtp_config()),
                input_ids=torch.tensor([ids[1:]]),
            )  # fmt: skip
        )[0]
    decoder, drafter = load(directory)
    world = RowWorld(decoder, 20)
    table = world.sequence(48).table
    found = []
    with torch.inference_mode():
        for first, last in [(0, 13), (13, 38), (38, 39), (39, 40)]:
            positions, span = torch.arange(first, last), [RowSpan(first, last - first, table)]
            own = decoder.forward(torch.tensor(ids[first:last]), positions, world.pool, span)
            following = torch.tensor(ids[first + 1 : last + 1])
            found.append(decoder.logits(drafter.forward(own, following, positions, world.pool, span)))
    assert float((torch.cat(found) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("strength", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_drafts_is_plain_greedy(tmp_path: Path, family: str, strength: float, num_drafts: int):
    decoder, drafter = load(drafting(tmp_path, family, strength))
    ids = some_ids(PROMPT)
    world = RowWorld(decoder, 20)
    greedy = DraftedGreedy(decoder, drafter, world.pool, world.sequence(64).table, num_drafts)
    assert drafted_greedy(greedy, ids, NEW) == plain_greedy(decoder, ids, NEW)
    if strength == 0.0:
        assert greedy.num_accepted == greedy.num_drafted == num_drafts * -(-(NEW - 1) // (num_drafts + 1))
    elif strength == 0.1 and num_drafts:
        assert 0 < greedy.num_accepted < greedy.num_drafted, "some guesses right, some wrong"


class WrongDrafter(MlaDrafter):
    """Guesses anything."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return torch.randn(super().forward(*args, **kwargs).shape, generator=self.generator)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_guesses_change_nothing(tmp_path: Path, family: str, seed: int):
    decoder, drafter = load(write_tiny_mla(tmp_path, family, num_nextn_predict_layers=1))
    drafter.__class__ = WrongDrafter
    drafter.generator = torch.Generator().manual_seed(seed)
    world = RowWorld(decoder, 20)
    greedy = DraftedGreedy(decoder, drafter, world.pool, world.sequence(64).table, 3)
    ids = some_ids(PROMPT, seed)
    assert drafted_greedy(greedy, ids, NEW, chunk=5) == plain_greedy(decoder, ids, NEW)
    assert greedy.num_accepted < 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_blocks_rows_go_along_and_are_needed(tmp_path: Path, family: str):
    decoder, drafter = load(write_tiny_mla(tmp_path, family, num_nextn_predict_layers=1))
    ids = some_ids(PROMPT)
    here = RowWorld(decoder, 20)
    source = DraftedGreedy(decoder, drafter, here.pool, (table := here.sequence(48).table), 2)
    with torch.inference_mode():
        pending = source.prefill(ids, 8)
    guesses = {}
    for name in ("carried", "stayed", "draft rows lost"):
        there = RowWorld(decoder, 20, seed=2)
        other = there.sequence(48).table if name != "stayed" else table
        (here if name == "stayed" else there).pool.pages[other] = here.pool.pages[table]
        world = here if name == "stayed" else there
        if name == "draft rows lost":
            for field, layer in decoder.layout.history:
                if layer == 3:
                    store = there.pool.of(other).history(field, layer)
                    store.write(0, torch.zeros(PROMPT, store.row_bytes, dtype=torch.uint8))
        span = [RowSpan(PROMPT, 1, other)]
        with torch.inference_mode():
            hidden = decoder.forward(torch.tensor([pending]), torch.tensor([PROMPT]), world.pool, span)
            guesses[name] = drafter.forward(
                hidden, torch.tensor([7]), torch.tensor([PROMPT]), world.pool, span
            )  # fmt: skip
            greedy = DraftedGreedy(decoder, drafter, world.pool, other, 2)
            greedy.resume(PROMPT, pending)
            found = [pending]
            while len(found) < 12:
                found += greedy.step()
        assert found[:12] == plain_greedy(decoder, ids, 12), name
    assert torch.allclose(guesses["carried"], guesses["stayed"], atol=1e-5)
    assert float((guesses["draft rows lost"] - guesses["stayed"]).abs().max()) > 1e-2


def test_guesses_end_where_the_pages_do(tmp_path: Path):
    decoder, drafter = load(drafting(tmp_path, "deepseek_v3", 0.0))
    ids = some_ids(PROMPT)
    world = RowWorld(decoder, 20)
    table = world.sequence(24).table  # three tokens may follow the prompt, and a fourth be known
    greedy = DraftedGreedy(decoder, drafter, world.pool, table, 3)
    assert drafted_greedy(greedy, ids, 4) == plain_greedy(decoder, ids, 4)
    assert (greedy.length, greedy.num_drafted) == (24, 2)


def test_drafts_count_up_to_the_first_wrong_one():
    assert [num_accepted(d, [1, 2, 3]) for d in ([], [1], [1, 2], [1, 9], [9, 2])] == [0, 1, 2, 1, 0]


def test_a_checkpoint_without_a_draft_block_is_refused(tmp_path: Path):
    directory = write_tiny_mla(tmp_path, "deepseek_v3")
    with pytest.raises(ConfigError, match="1 draft layers are asked for, the checkpoint has 0"):
        load(directory)
