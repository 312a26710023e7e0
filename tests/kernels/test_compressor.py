"""Pooling of windows: against the formula in float64, against the oracle's modules, and one row at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tailrace.kernels.compressor import Overlap, Running, extend, overlap_of, pool, pool_overlapping

DIM = 6


def rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and gates far enough apart that one slot can outweigh the others."""
    return torch.randn(shape), torch.randn(shape) * 3


def test_an_entry_is_its_slots_weighed_channel_by_channel():
    torch.manual_seed(1)
    values, gates = rows(3, 5, DIM)
    found = pool(values, gates)
    for w in range(3):
        for c in range(DIM):
            weight = gates[w, :, c].double().exp()
            expected = (weight * values[w, :, c].double()).sum() / weight.sum()
            assert abs(found[w, c].double() - expected) < 1e-6


def test_an_overlapping_entry_takes_first_halves_of_the_window_before_and_second_halves_of_its_own():
    torch.manual_seed(2)
    values, gates = rows(4, 3, 2 * DIM)
    found = pool_overlapping(values, gates, None)
    for w in range(4):
        own = values[w, :, DIM:], gates[w, :, DIM:]
        old = (values[w - 1, :, :DIM], gates[w - 1, :, :DIM]) if w else (own[0][:0], own[1][:0])
        expected = pool(torch.cat((old[0], own[0])).double(), torch.cat((old[1], own[1])).double())
        assert (found[w].double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_windows_pooled_in_two_goes_are_those_pooled_at_once(cut: int):
    torch.manual_seed(3)
    values, gates = rows(4, 3, 2 * DIM)
    whole = pool_overlapping(values, gates, None)
    left = overlap_of(values[:cut], gates[:cut])
    assert left.values.shape == (3, DIM)
    rest = pool_overlapping(values[cut:], gates[cut:], left)
    torch.testing.assert_close(rest, whole[cut:], rtol=0, atol=1e-7)
    without = pool_overlapping(values[cut:], gates[cut:], Overlap(torch.zeros(3, DIM), torch.zeros(3, DIM)))
    assert (without[0] - whole[cut]).abs().max() > 1e-2  # so the overlap is read
    assert pool_overlapping(values[:0], gates[:0], left).shape == (0, DIM)


@pytest.mark.parametrize("cuts", [(16,), (1, 16), (5, 6, 16), tuple(range(1, 17))])
def test_a_window_extended_by_any_cuts_is_the_window_pooled_at_once_to_the_bit(cuts: tuple[int, ...]):
    torch.manual_seed(4)
    values, gates = rows(16, DIM)
    gates[7] += 80  # far above the others: without the running maximum this overflows
    running: Running | None = None
    start = 0
    for end in cuts:
        running = extend(running, values[start:end], gates[start:end])
        start = end
    assert running is not None
    assert torch.equal(running.entry(), pool(values[None], gates[None])[0])
    weights = gates.double().softmax(0)
    assert (running.entry() - (weights * values.double()).sum(0)).abs().max() < 1e-6
    gone = torch.full((2, DIM), -torch.inf)  # rows with such gates are not there
    assert all(map(torch.equal, extend(running, torch.ones(2, DIM), gone), running))


def test_entries_are_the_oracles():
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    torch.manual_seed(5)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    config = DeepseekV4Config(hidden_size=32, head_dim=16, qk_rope_head_dim=8, compress_rates=rates, q_lora_rank=8,
                              index_n_heads=2, index_head_dim=8, num_attention_heads=2)  # fmt: skip
    x, positions = torch.randn(1, 27, 32), torch.arange(27)[None]
    for name, m in (("CSA", 4), ("HCA", 8)):
        module = getattr(deepseek, f"DeepseekV4{name}Compressor")(config)
        module.position_bias = nn.Parameter(torch.randn_like(module.position_bias))
        with torch.inference_mode():
            # A fresh cache layer gathers windows; without rotary and norm the entries are the pooled rows themselves.
            module.kv_norm = nn.Identity()
            module.rotary_emb.compress_inv_freq.zero_()
            if name == "CSA":
                module.indexer.forward = lambda *_: torch.zeros(1, 27, 1, dtype=torch.long)
            expected = module(x, torch.zeros(1, 27, 8), positions, None, 0)[0][0, 0]
            windows = 27 // m
            values = module.kv_proj(x)[0, : windows * m].unflatten(0, (windows, m))
            gates = module.gate_proj(x)[0, : windows * m].unflatten(0, (windows, m)) + module.position_bias
            found = pool_overlapping(values, gates, None) if name == "CSA" else pool(values, gates)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
