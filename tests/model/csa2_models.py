"""Tiny random DeepSeek V4.1 models, without files, and a pool of shuffled, poisoned pages to run them on.

Nothing is left at an init of zero or one: sinks, gates, biases, mHC bases and Engram tables are random, so that what a
decoder leaves out shows. Table rows are numbers of four bits, which survive a rounding to FP8 (mlx-vlm does one more).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa2_config import Csa2Config, parse_config
from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.csa2_tensors import draft_shapes, tensor_shapes
from tailrace.model.csa2_weights import load_weights
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorEntry

PLAIN: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "vocab_size": 97,
    "hidden_size": 96,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 16,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6, 7],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 5,
    "candidate_block_size": 4,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 12,
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "max_position_embeddings": 1024,
}
ENGRAM: dict[str, Any] = {
    **PLAIN,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 100,
    "engram_num_embeddings": [700, 900],
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 61,
    "image_token_id": 96,
}
DRAFT: dict[str, Any] = {
    **ENGRAM,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 7, 8],
    "dspark_noise_token_id": 95,
    "dspark_markov_rank": 8,
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 2,
}
POISON = 0xFF


def token_map() -> np.ndarray:
    """97 ids onto 61 classes."""
    rng = np.random.default_rng(5)
    return np.concatenate((rng.permutation(61), rng.integers(0, 61, 36)))


def random_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 tensors under the checkpoint's names, those of draft stages last."""
    generator = torch.Generator().manual_seed(seed)
    config = parse_config(raw, "tiny")
    shapes = [*tensor_shapes(config), *draft_shapes(config)]
    return {name: _random(name, shape, generator) for name, shape in shapes}


def knowing_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Of a model whose next word hangs on the last one most, and whose draft stages know that by their Markov head:
    they are often right. `raw`: dspark_markov_rank is the hidden size."""
    tensors = random_tensors(raw, seed)
    for name, tensor in tensors.items():
        if name.endswith(("wo_b.weight", ".w2.weight", "engram.wkv.weight")):
            tensor *= 0.1
        if name.startswith("mtp.") and name.endswith(".norm.weight") and name.count(".") == 3:
            tensor *= 0.02  # what the stages computed counts for little
    embed = tensors["embed.weight"]
    known = embed * embed.square().mean(1, keepdim=True).rsqrt() * tensors["norm.weight"]
    for name in tensors:
        if name.endswith("markov_w1.weight"):
            tensors[name] = known
        if name.endswith("markov_w2.weight"):
            tensors[name] = tensors["head.weight"].clone()
        if name.endswith("confidence_head.proj.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1 + 0.3 * x
    if name.endswith("engram.embed.weight"):
        return (x * 4).round().clamp(-15, 15) / 4
    if name.endswith("_scale"):
        return 0.7 + 0.2 * x.abs()
    if name.endswith("_base"):
        return 0.5 * x
    if name.endswith("gate.bias"):
        return 0.2 * x
    if name.endswith("attn_sink"):
        return x
    if name == "embed.weight":
        return x
    return x * (1.5 if "indexer" in name or "compressor" in name else 1.0) / shape[-1] ** 0.5


def entries(tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, name, tuple(x.shape), "F32", x.contiguous().view(-1).view(torch.uint8).numpy())
        for name, x in tensors.items()
    }


def make_decoder(
    raw: dict[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Csa2Decoder:
    config = parse_config(raw, "tiny")
    config = config.drafting() if config.draft is not None else config
    tensors = random_tensors(raw, seed) if tensors is None else tensors
    classes = token_map() if config.engram is not None else None
    return Csa2Decoder(load_weights(entries(tensors), config, dtype, classes), 16)


class Pages:
    """A pool and the page tables of sequences in it: numbers shuffled, bytes poisoned."""

    def __init__(self, decoder: Csa2Decoder, num_pages: int = 200, seed: int = 0) -> None:
        self.decoder = decoder
        bytes_per_page = decoder.layout.bytes_per_page
        self.pool = RowPool(torch.full((num_pages, bytes_per_page), POISON, dtype=torch.uint8), decoder.layout)
        self._free = list(np.random.default_rng(seed).permutation(np.arange(1, num_pages)))

    def table(self, num_tokens: int) -> np.ndarray:
        """Pages for so many tokens, of a new sequence."""
        layout = self.decoder.layout
        count = -(-num_tokens // layout.tokens_per_page) + layout.num_state_pages
        return np.array([self._free.pop() for _ in range(count)])

    def copy(self, table: np.ndarray, num_tokens: int) -> np.ndarray:
        """The same sequence on other pages: what a hand-off after `num_tokens` tokens brings, and poison elsewhere."""
        layout = self.decoder.layout
        moved = np.array([self._free.pop() for _ in table])
        history = len(table) - layout.num_state_pages
        used = [*range(-(-num_tokens // layout.tokens_per_page))]
        used += [history + i for i in range(layout.state_pages_needed(num_tokens))]
        self.pool.pages[moved[used]] = self.pool.pages[table[used]]
        return moved


def run(
    pages: Pages, table: np.ndarray, ids: Sequence[int], start: int = 0, cuts: Sequence[int] = (), **how: Any
) -> torch.Tensor:
    """Logits of ids at positions start on, in chunks that end at `cuts` (positions) and at the end: [n, vocab]."""
    found = []
    end = start + len(ids)
    for last in (*(cut for cut in sorted(cuts) if start < cut < end), end):
        found.append(step(pages, [(table, ids, start)], last, **how))
        ids, start = ids[last - start :], last
    return torch.cat(found)


def step(pages: Pages, parts: Sequence[tuple[np.ndarray, Sequence[int], int]], end: int | None = None, **how: Any):
    """One step over sequences (table, ids, start), up to position `end` if that is given -> logits of all tokens."""
    parts = [(t, ids if end is None else ids[: end - start], start) for t, ids, start in parts]
    ids = torch.tensor([i for _, some, _ in parts for i in some])
    positions = torch.cat([torch.arange(start, start + len(some)) for _, some, start in parts])
    spans = [RowSpan(start, len(some), table) for table, some, start in parts]
    decoder = pages.decoder
    return decoder.logits(decoder.forward(ids, positions, pages.pool, spans, **how))


def random_ids(count: int, seed: int = 0, vocab: int = 96) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def config_of(raw: dict[str, Any]) -> Csa2Config:
    return parse_config(raw, "tiny")
