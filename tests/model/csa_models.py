"""Tiny random DeepSeek V4 models, as oracle and as ours, and sequences in poisoned pages of shuffled numbers.

oracle, decoder = tiny_v4(layers="WWCHC")            # W window, C CSA, H HCA
pages = Pages(decoder.layout)
sequence = pages.sequence(200)                       # room for so many tokens
logits = run(decoder, pages, [(sequence, ids)])      # of every new token, and the sequence is longer by them
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa_config import CsaConfig, parse_config
from tailrace.model.csa_decoder import CsaDecoder, load
from tailrace.model.family import RowDecoder
from tailrace.model.row_groups import RowPages
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorEntry, TensorTable

KINDS = {
    "W": "sliding_attention",
    "C": "compressed_sparse_attention",
    "H": "heavily_compressed_attention",
}
RATIOS = {"W": 0, "C": 4, "H": 16}
VOCAB = 96


def tiny_config(layers: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a model with these layers, for transformers and for us."""
    return {
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": len(layers),
        "layer_types": [KINDS[layer] for layer in layers],
        "compress_rates": {KINDS["C"]: RATIOS["C"], KINDS["H"]: RATIOS["H"]},
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 2,
        "max_position_embeddings": 1024,
        "hc_sinkhorn_iters": 4,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32,
            "beta_slow": 1,
        },
    } | overrides  # fmt: skip


def oracle_model(config: dict[str, Any], seed: int = 1) -> Any:
    """transformers' model, float32, with every weight random: a zero sink or position bias would hide its branch."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    known = {k: v for k, v in config.items() if k not in ("model_type", "rope_scaling")}
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config(**known, rope_parameters=dict(config["rope_scaling"]), attn_implementation="eager")
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if name.endswith("inv_freq"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("tid2eid"):
            noise = torch.stack([torch.randperm(config["n_routed_experts"], generator=generator)
                                 [: tensor.shape[1]] for _ in range(len(tensor))])  # fmt: skip
        elif "norm" in name:
            noise = 1 + 0.2 * noise
        elif name.endswith("scale"):
            noise = 1 + 0.3 * noise
        elif name.endswith(("base", "sinks", "position_bias")):
            pass
        elif name.endswith("e_score_correction_bias"):
            noise = 0.2 * noise
        elif "embed_tokens" in name:
            pass
        elif name.endswith((".fn", "hc_fn")):
            noise = noise * tensor.shape[-1] ** -0.5
        else:
            noise = 2 * noise * tensor.shape[-1] ** -0.5
        tensor.data.copy_(noise)
    return model


_PUBLISHED = (
    (r"^model\.", ""), (r"^embed_tokens", "embed"), (r"^lm_head", "head"), (r"^hc_head\.hc_", "hc_head_"),
    (r"\.input_layernorm", ".attn_norm"), (r"\.post_attention_layernorm", ".ffn_norm"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.scorer\.weights_proj", ".indexer.weights_proj"),
    (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"), (r"\.compressor\.kv_norm", ".compressor.norm"),
    (r"\.sinks", ".attn_sink"), (r"\.position_bias", ".ape"), (r"\.q_a_norm", ".q_norm"),
    (r"\.q_a_proj", ".wq_a"), (r"\.q_b_proj", ".wq_b"), (r"\.kv_proj", ".wkv"),
    (r"compressor\.gate_proj", "compressor.wgate"),
    (r"\.o_a_proj", ".wo_a"), (r"\.o_b_proj", ".wo_b"), (r"e_score_correction_bias", "bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"), (r"shared_experts\.down_proj", "shared_experts.w2"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
)  # fmt: skip


def published_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The oracle's weights under the names of published checkpoints."""
    result = {}
    for stored, tensor in model.state_dict().items():
        name = stored
        for pattern, written in _PUBLISHED:
            name = re.sub(pattern, written, name)
        prefix, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                result[f"{prefix}.experts.{e}.w1.weight"], result[f"{prefix}.experts.{e}.w3.weight"] = gate, up
        elif last == "down_proj":
            result |= {f"{prefix}.experts.{e}.w2.weight": down for e, down in enumerate(tensor)}
        else:
            result[name] = tensor
    return {name: tensor.contiguous() for name, tensor in result.items()}


def tensor_table(tensors: dict[str, torch.Tensor]) -> TensorTable:
    """As of a file, in memory."""
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    entries = [
        TensorEntry(n, n, tuple(t.shape), kinds[t.dtype], t.view(torch.uint8).reshape(-1).numpy())
        for n, t in tensors.items()
    ]
    return TensorTable(entries, (), "memory")


def tiny_v4(
    layers: str = "WWCHC",
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    tokens_per_page: int = 32,
    **overrides: Any,
) -> tuple[Any, CsaDecoder]:
    """An oracle and our decoder of the same weights."""
    raw = tiny_config(layers, **overrides)
    oracle = oracle_model(raw, seed)
    return oracle, decoder_of(oracle, parse_config(raw, "config.json"), dtype, tokens_per_page)


def decoder_of(oracle: Any, config: CsaConfig, dtype: torch.dtype, tokens_per_page: int = 32) -> CsaDecoder:
    """Ours, of the oracle's weights."""
    return load(tensor_table(published_tensors(oracle)), config, dtype, tokens_per_page)


@contextlib.contextmanager
def stable_topk() -> Iterator[None]:
    """Within, the oracle's index takes the lower number of equal scores: torch's own choice depends on the shape."""
    with pytest.MonkeyPatch.context() as patch:

        def topk(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
            best = scores.sort(dim=dim, descending=True, stable=True)
            return torch.return_types.topk((best.values[..., :k], best.indices[..., :k]))

        patch.setattr(torch.Tensor, "topk", topk)
        yield


@torch.inference_mode()
def oracle_logits(oracle: Any, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], of one forward without a cache."""
    with stable_topk():
        return oracle(torch.tensor([list(ids)]), use_cache=False).logits[0]


@dataclass(slots=True)
class Held:
    """table: its pages;  length: tokens so far."""

    table: np.ndarray
    length: int = 0


@dataclass(slots=True)
class Pages:
    """A pool of poisoned pages that hands them out in a random order."""

    layout: RowPages
    num_pages: int = 200
    seed: int = 7
    pool: RowPool = field(init=False)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        pages = torch.full((self.num_pages, self.layout.bytes_per_page), 0xFF, dtype=torch.uint8)
        self.pool = RowPool(pages, self.layout)
        self._free = list(np.random.default_rng(self.seed).permutation(np.arange(1, self.num_pages)))

    def sequence(self, tokens: int) -> Held:
        """A fresh one with room for so many tokens."""
        count = -(-tokens // self.layout.tokens_per_page) + self.layout.num_state_pages
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return Held(np.array(taken))

    def moved(self, source: Pages, sequence: Held, tokens: int) -> Held:
        """A copy of a sequence of another pool, in pages of this one: what a hand-off copies and no more."""
        mine = self.sequence(tokens)
        size, states = self.layout.tokens_per_page, self.layout.num_state_pages
        used = -(-sequence.length // size)
        needed = self.layout.state_pages_needed(sequence.length)
        for a, b in ((sequence.table[:used], mine.table[:used]),
                     (sequence.table[-states:][:needed], mine.table[-states:][:needed])):  # fmt: skip
            self.pool.pages[b] = source.pool.pages[a]
        mine.length = sequence.length
        return mine


@torch.inference_mode()
def run(
    decoder: RowDecoder, pages: Pages, work: Sequence[tuple[Held, Sequence[int]]], padding: int = 0
) -> torch.Tensor:
    """One step: [new tokens of all, vocab]."""
    spans = [RowSpan(s.length, len(ids), s.table) for s, ids in work]
    ids = torch.tensor([i for _, new in work for i in new] + [0] * padding)
    positions = torch.cat(
        [torch.arange(s.length, s.length + len(new)) for s, new in work] + [torch.zeros(padding).long()]
    )
    hidden = decoder.forward(ids, positions, pages.pool, spans)
    for sequence, new in work:
        sequence.length += len(new)
    return decoder.logits(hidden[: len(ids) - padding])


def some_ids(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def with_draft(oracle: Any, config: CsaConfig, tokens_per_page: int = 32) -> tuple[CsaDecoder, dict[str, torch.Tensor]]:
    """Ours, of an oracle whose last layer, a window layer, is taken for the draft block; and that block's own ends."""
    last = f"layers.{config.num_layers - 1}."
    tensors = {n.replace(last, "mtp.0."): t for n, t in published_tensors(oracle).items()}
    generator = torch.Generator().manual_seed(11)
    hidden, n = config.hidden_size, config.streams
    ends = {f"{name}.weight": 1 + 0.2 * torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm", "norm")}
    ends |= {f"{name}.weight": torch.randn(hidden, hidden, generator=generator) * hidden**-0.5
             for name in ("e_proj", "h_proj")}  # fmt: skip
    ends["hc_head_fn"] = torch.randn(n, n * hidden, generator=generator) * (n * hidden) ** -0.5
    ends["hc_head_base"], ends["hc_head_scale"] = torch.randn(n, generator=generator), torch.ones(1)
    config = dataclasses.replace(
        config,
        kinds=config.kinds[:-1],
        hash_layers=config.hash_layers[:-1],
        num_draft_layers_stored=1,
        num_draft_layers=1,
    )
    table = tensor_table(tensors | {f"mtp.0.{name}": tensor for name, tensor in ends.items()})
    return load(table, config, torch.float32, tokens_per_page), ends
