"""Steps of few tokens on quantized weights: the native ones against their twin, and against the exact model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_tiny_gguf

from tailrace.kernels import few_rows as kernels
from tailrace.kernels.paged_attention import PagedPool, RowSpan, plan_attention
from tailrace.model.decoder import Decoder
from tailrace.model.few_rows import FewRows, pack
from tailrace.model.source import open_source
from tailrace.model.weights import Weights, load_weights

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
PAGE = 16
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]

pytestmark = pytest.mark.skipif(kernels.native() is None, reason="no numba, or no CPU with AVX2")


class TwinRows(FewRows):
    """The plain twin in the place of the compiled kernels."""

    def __init__(self, weights: Weights) -> None:
        assert weights.few_rows is not None
        super().__init__(weights.config, weights.few_rows)
        self._native = kernels


def loaded(tmp_path: Path, family: str, kind: str) -> tuple[Weights, Weights]:
    """(packed, float32), its output projection Q8_0."""
    kinds = {"output.weight": "Q8_0", "token_embd.weight": "Q8_0"}
    source = open_source(str(write_tiny_gguf(tmp_path / "m.gguf", family, kind=kind, kinds=kinds, **WIDE)))
    return load_weights(source, dtype=torch.bfloat16), load_weights(source, dtype=torch.float32)


def pool_of(weights: Weights) -> PagedPool:
    config = weights.config
    shape = (12, config.num_layers, 2, config.num_kv_heads, PAGE, config.head_dim)
    return PagedPool(torch.zeros(shape, dtype=weights.dtype))


def run(
    weights: Weights, few: FewRows, steps: list[list[tuple[list[int], RowSpan]]], threads: int = 1
) -> tuple[torch.Tensor, PagedPool]:
    pool = pool_of(weights)
    parts = []
    for step in steps:
        ids = torch.tensor([t for tokens, _ in step for t in tokens])
        parts.append(few.forward(weights.embed(ids).float(), [row for _, row in step], pool, threads=threads))
    return torch.cat(parts), pool


def steps_of() -> list[list[tuple[list[int], RowSpan]]]:
    """Two sequences in pages out of order: chunks over a page's edge, then both at once, one with drafts."""
    a, b = np.array([7, 2, 9], np.int32), np.array([4, 3], np.int32)
    return [
        [(list(range(10, 18)), RowSpan(0, 8, a))],
        [(list(range(20, 28)), RowSpan(8, 8, a))],
        [(list(range(30, 36)), RowSpan(16, 6, a)), ([5, 6], RowSpan(0, 2, b))],
        [([40], RowSpan(22, 1, a)), ([41, 42, 43], RowSpan(2, 3, b, num_drafts=2))],
    ]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_native_step_is_its_twin(tmp_path: Path, family: str, kind: str):
    packed, _ = loaded(tmp_path, family, kind)
    assert packed.few_rows is not None
    steps = steps_of()
    found, pool = run(packed, FewRows(packed.config, packed.few_rows), steps)
    expected, twin_pool = run(packed, TwinRows(packed), steps)
    # What is stored may fall on either side of a bf16 step; all else differs by the activations' 16 bits.
    assert (found - expected).norm() < 4e-3 * expected.norm()
    assert (pool.kv.float() - twin_pool.kv.float()).norm() < 2e-3 * twin_pool.kv.float().norm()
    written = pool.kv != 0
    assert torch.equal(written, twin_pool.kv != 0) and not written[0].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_are_near_the_float32_model(tmp_path: Path, family: str):
    packed, exact = loaded(tmp_path, family, "Q4_1")
    served, reference = Decoder(packed), Decoder(exact)
    assert served.max_few == kernels.MAX_ROWS
    pool, exact_pool = pool_of(packed), pool_of(exact)
    for step in steps_of():
        ids = torch.tensor([t for tokens, _ in step for t in tokens])
        rows = sorted((row for _, row in step), key=lambda row: row.num_new > 1)
        positions = torch.cat([torch.arange(row.start, row.start + row.num_new) for row in rows])
        found = served.logits(served.forward_few(ids, rows, pool))
        plan = plan_attention(exact_pool, rows, reference.windows)
        expected = reference.logits(reference.forward(ids, positions, exact_pool, plan))
        assert (found - expected).norm() < 1e-2 * expected.norm()


def test_a_page_that_holds_nan_spoils_its_reader_alone(tmp_path: Path):
    packed, _ = loaded(tmp_path, "llama", "Q4_1")
    decoder, pool = Decoder(packed), pool_of(packed)
    a, b = np.array([1], np.int32), np.array([2], np.int32)
    decoder.forward_few(torch.tensor([1, 2, 3, 4]), [RowSpan(0, 2, a), RowSpan(0, 2, b)], pool)
    pool.kv[1, 1, 1, 0, 0, 5] = torch.nan
    hidden = decoder.forward_few(torch.tensor([5, 6]), [RowSpan(2, 1, a), RowSpan(2, 1, b)], pool)
    assert not hidden[0].isfinite().any() and hidden[1].isfinite().all()


def test_what_is_not_all_four_bit_keeps_the_plain_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mixed = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_1", kinds={"blk.1.attn_v.weight": "Q8_0"}, **WIDE)
    source = open_source(str(mixed))
    assert pack(source.config, source.tensors) is None
    assert Decoder(load_weights(source, dtype=torch.bfloat16)).max_few == 0
    plain = open_source(str(write_tiny_gguf(tmp_path / "p.gguf", "llama", kind="Q4_1", **WIDE)))
    assert Decoder(load_weights(plain, dtype=torch.bfloat16, quantized=False)).max_few == 0
    monkeypatch.setattr(kernels, "native", lambda: None)
    assert Decoder(load_weights(plain, dtype=torch.bfloat16)).max_few == 0


def test_two_threads_change_no_bit(tmp_path: Path):
    packed, _ = loaded(tmp_path, "llama", "Q4_1")
    assert packed.few_rows is not None
    rows = [([10 + i, 20 + i], RowSpan(0, 2, np.array([1 + i], np.int32))) for i in range(3)]
    steps = [rows, *([([40 + i], RowSpan(2, 1, np.array([1 + i], np.int32))) for i in range(n)] for n in (3, 2, 1))]
    one, pool = run(packed, FewRows(packed.config, packed.few_rows), steps)
    two, other = run(packed, FewRows(packed.config, packed.few_rows, threads=2), steps, threads=2)
    assert torch.equal(one, two) and torch.equal(pool.kv, other.kv)
