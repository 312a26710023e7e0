"""Loaded weights against transformers' own reading of the same files, and the packed forms against the exact ones."""

from pathlib import Path

import gguf
import pytest
import torch
from checkpoints import FAMILIES, write_tiny_checkpoint
from gguf_files import encode, torch_dequantized, write_tiny_gguf
from transformers import AutoModelForCausalLM

from tailrace.kernels import few_rows
from tailrace.model import quantized
from tailrace.model.errors import ConfigError
from tailrace.model.linear import MAX_INT4_ROWS, ByRowsLinear, DenseLinear
from tailrace.model.shard import Shard
from tailrace.model.source import ModelSource, open_source
from tailrace.model.tensors import TensorEntry
from tailrace.model.weights import Weights, load_weights

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
# Rows of every matrix are a multiple of 256, as the K types want.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture
def without_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as where no native kernels run: PyTorch's own packed products."""
    monkeypatch.setattr(few_rows, "native", lambda: None)


def float32(source: ModelSource) -> Weights:
    return load_weights(source, dtype=torch.float32)


def assert_equal_to_transformers(weights: Weights, state: dict[str, torch.Tensor]) -> None:
    """Every parameter bit-equal; fused projections are the reference's rows one after another."""

    def fused(prefix: str, parts: list[str], leaf: str) -> torch.Tensor | None:
        found = [state[f"{prefix}{p}_proj.{leaf}"] for p in parts if f"{prefix}{p}_proj.{leaf}" in state]
        return torch.cat(found) if found else None

    def same(linear: object, prefix: str, parts: list[str]) -> None:
        assert isinstance(linear, DenseLinear)
        expected = fused(prefix, parts, "weight")
        assert expected is not None
        assert torch.equal(linear.weight, expected), prefix + parts[0]
        bias = fused(prefix, parts, "bias")
        assert (linear.bias is None) == (bias is None)
        assert bias is None or (linear.bias is not None and torch.equal(linear.bias, bias))

    ids = torch.arange(weights.config.vocab_size)
    assert torch.equal(weights.embed(ids), state["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, state["model.norm.weight"])
    assert isinstance(weights.lm_head, DenseLinear)
    assert torch.equal(weights.lm_head.weight, state["lm_head.weight"])
    for i, layer in enumerate(weights.layers):
        p = f"model.layers.{i}."
        assert torch.equal(layer.input_norm, state[p + "input_layernorm.weight"])
        assert torch.equal(layer.post_norm, state[p + "post_attention_layernorm.weight"])
        same(layer.qkv_proj, p + "self_attn.", ["q", "k", "v"])
        same(layer.o_proj, p + "self_attn.", ["o"])
        same(layer.gate_up_proj, p + "mlp.", ["gate", "up"])
        same(layer.down_proj, p + "mlp.", ["down"])
        for norm, name in ((layer.q_norm, "q_norm"), (layer.k_norm, "k_norm")):
            expected = state.get(f"{p}self_attn.{name}.weight")
            assert (norm is None) == (expected is None)
            assert norm is None or torch.equal(norm, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_directory_saved_by_transformers_loads_bit_equal(tmp_path: Path, family: str, tied: bool):
    tiny = write_tiny_checkpoint(tmp_path / "ours", family, tie_word_embeddings=tied, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    saved = tmp_path / "saved"
    model.save_pretrained(saved, max_shard_size="200KB")
    assert (saved / "model.safetensors.index.json").exists()
    (saved / "tokenizer.json").write_text((tiny / "tokenizer.json").read_text())
    weights = float32(open_source(str(saved)))
    assert_equal_to_transformers(weights, model.state_dict())


def test_our_own_tiny_checkpoints_are_the_same_single_or_sharded(tmp_path: Path):
    one = open_source(str(write_tiny_checkpoint(tmp_path / "one", "qwen2")))
    three = open_source(str(write_tiny_checkpoint(tmp_path / "three", "qwen2", shards=3)))
    ids = torch.arange(512)
    assert torch.equal(float32(one).embed(ids), float32(three).embed(ids))
    assert one.revision == three.revision


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_holds_what_the_directory_held(tmp_path: Path, family: str):
    tiny = write_tiny_checkpoint(tmp_path / "hf", family)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    source = open_source(str(write_tiny_gguf(tmp_path / "m.gguf", family)))
    assert_equal_to_transformers(float32(source), model.state_dict())
    directory = open_source(str(tiny))
    assert (source.config.windows, source.config.rope) == (directory.config.windows, directory.config.rope)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q6_K"])
def test_a_quantized_gguf_file_loads_as_transformers_loads_it(tmp_path: Path, kind: str):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", kind=kind, **WIDE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert_equal_to_transformers(float32(open_source(str(path))), model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_every_storage_type_is_decoded_as_gguf_decodes_it(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized, "_CHUNK_ELEMENTS", 512 * 3)  # several chunks, the last one shorter
    quantization = gguf.GGMLQuantizationType[kind]
    matrix = torch.randn(10, 512, generator=torch.Generator().manual_seed(1)).numpy()
    raw = encode(matrix, quantization)
    entry = TensorEntry("w", "w", (10, 512), kind, raw.reshape(-1).view("uint8"))
    expected = torch_dequantized(raw, quantization)
    assert torch.equal(quantized.dense(entry, torch.float32), expected)
    assert torch.equal(quantized.dense(entry, torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("kind", quantized.INT4_KINDS)
def test_codes_and_scales_say_exactly_what_the_blocks_say(kind: str):
    quantization = gguf.GGMLQuantizationType[kind]
    matrix = torch.randn(16, 512, generator=torch.Generator().manual_seed(2)).numpy()
    raw = encode(matrix, quantization)
    groups = quantized.int4_groups(TensorEntry("w", "w", (16, 512), kind, raw.reshape(-1).view("uint8")))
    assert int(groups.codes.max()) <= 15
    # Only the order of float32 operations differs.
    assert torch.allclose(groups.dequantized(), torch_dequantized(raw, quantization), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("without_native_steps")
@pytest.mark.parametrize("kind", quantized.INT4_KINDS)
def test_packed_and_bf16_products_agree_with_the_exact_one(tmp_path: Path, kind: str):
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen2", kind=kind, **WIDE)
    source = open_source(str(path))
    exact, packed = float32(source), load_weights(source, dtype=torch.bfloat16)
    for rows in (1, MAX_INT4_ROWS, MAX_INT4_ROWS + 1, 40):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).bfloat16()
        for name in ("qkv_proj", "gate_up_proj"):
            linear, reference = getattr(packed.layers[1], name), getattr(exact.layers[1], name)
            assert isinstance(linear, ByRowsLinear)
            expected = reference(x.float())
            error = (linear(x).float() - expected).norm() / expected.norm()
            assert error < 5e-3, (name, rows, float(error))


@pytest.mark.usefixtures("without_native_steps")
def test_parts_of_different_types_are_packed_where_they_can_be(tmp_path: Path):
    kinds = {"blk.0.attn_v.weight": "Q6_K", "blk.1.attn_k.weight": "Q8_0", "blk.1.attn_v.weight": "F16"}
    path = write_tiny_gguf(tmp_path / "m.gguf", "qwen2", kind="Q4_K", kinds=kinds, **WIDE)
    source = open_source(str(path))
    exact, packed = float32(source), load_weights(source, dtype=torch.bfloat16)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    for layer in (0, 1):
        assert isinstance(packed.layers[layer].qkv_proj, ByRowsLinear)
        expected = exact.layers[layer].qkv_proj(x.float())
        error = (packed.layers[layer].qkv_proj(x).float() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2


def test_weights_that_cannot_be_packed_are_served_in_bf16(tmp_path: Path):
    source = open_source(
        str(write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_0", num_key_value_heads=1, head_dim=8))
    )
    exact, packed = float32(source), load_weights(source, dtype=torch.bfloat16)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = exact.layers[0].qkv_proj(x.float())
    assert torch.allclose(packed.layers[0].qkv_proj(x).float(), expected, atol=0.05)


def test_a_q8_embedding_kept_packed_gives_the_rows_of_a_dense_one(tmp_path: Path):
    source = open_source(str(write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q8_0", tie_word_embeddings=True)))
    packed = load_weights(source, dtype=torch.bfloat16)
    dense = load_weights(source, dtype=torch.bfloat16, quantized=False)
    ids = torch.tensor([0, 3, 511, 3], dtype=torch.int32)
    assert torch.equal(packed.embed(ids), dense.embed(ids))
    assert packed.embed.num_bytes < dense.embed.num_bytes


def test_embedded_rows_may_be_written_to(tmp_path: Path):
    weights = float32(open_source(str(write_tiny_checkpoint(tmp_path / "m", "llama"))))
    ids = torch.tensor([5])
    before = weights.embed(ids).clone()
    weights.embed(ids).add_(1.0)
    assert torch.equal(weights.embed(ids), before)


def test_progress_rises_to_the_whole_and_ends_there(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    source = open_source(str(write_tiny_checkpoint(tmp_path / "m", "qwen3")))
    load_weights(source, dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})
    assert seen[-1] == (source.tensors.num_bytes, source.tensors.num_bytes)


def test_other_dtypes_are_refused(tmp_path: Path):
    source = open_source(str(write_tiny_checkpoint(tmp_path / "m", "llama")))
    with pytest.raises(ConfigError, match="float16"):
        load_weights(source, dtype=torch.float16)


def test_greedy_output_of_tiny_checkpoints_is_diverse_and_hangs_on_the_whole_prompt(tmp_path: Path):
    for family in FAMILIES:
        directory = write_tiny_checkpoint(tmp_path / family, family)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.tensor([[200, 41, 77, 310, 5, 17]])
        other = ids.clone()
        other[0, 0] = 201
        runs = [
            model.generate(x, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=1)[0, 6:].tolist()
            for x in (ids, other)
        ]
        assert len(set(runs[0])) >= 16, (family, runs[0])
        assert sum(a == b for a, b in zip(*runs, strict=True)) < 8, family


# --------------------------------------------------------------------------------------------------- shares of ranks


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("source", ["directory", "gguf"])
def test_the_shares_of_all_ranks_make_the_whole(tmp_path: Path, source: str, tp: int):
    """Query rows, MLP rows and the columns that read them are divided, 2 key-value heads held by 4 ranks in pairs."""
    biases = {} if source == "gguf" else {"attention_bias": True, "mlp_bias": True}
    path = (
        write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q8_0", **WIDE)
        if source == "gguf"
        else write_tiny_checkpoint(tmp_path / "m", "llama", **biases)
    )
    opened = open_source(str(path))
    whole = float32(opened)
    parts = [load_weights(opened, dtype=torch.float32, shard=Shard(rank, tp)) for rank in range(tp)]
    assert [part.lm_head is None for part in parts] == [False] + [True] * (tp - 1)
    dim, heads, kv_heads = opened.config.head_dim, opened.config.num_heads, opened.config.num_kv_heads
    for i, layer in enumerate(whole.layers):
        shares = [part.layers[i] for part in parts]
        q, k, v = layer.qkv_proj.weight.split([heads * dim, kv_heads * dim, kv_heads * dim])
        each = heads * dim // tp
        for rank, share in enumerate(shares):
            held = slice(rank * kv_heads // tp * dim, (rank * kv_heads // tp + 1) * dim)
            expected = torch.cat((q[rank * each : (rank + 1) * each], k[held], v[held]))
            assert torch.equal(share.qkv_proj.weight, expected)
            assert torch.equal(share.input_norm, layer.input_norm)
            assert (share.o_proj.bias is None) == (share.down_proj.bias is None) == (rank > 0 or not biases)
        for name in ("o_proj", "down_proj"):
            columns = torch.cat([getattr(share, name).weight for share in shares], 1)
            assert torch.equal(columns, getattr(layer, name).weight)
        halves = [share.gate_up_proj.weight.chunk(2) for share in shares]
        gate_up = torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        assert torch.equal(gate_up, layer.gate_up_proj.weight)


def test_packed_weights_are_not_split(tmp_path: Path):
    source = open_source(str(write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_1", **WIDE)))
    with pytest.raises(ConfigError, match="not split over 2 ranks"):
        load_weights(source, dtype=torch.bfloat16, quantized=True, shard=Shard(0, 2))
