"""The Llama family's step for few tokens on a file's own quantized weights, in one native call (kernels/few_rows.py).

Activations stay float32 all the way; keys and values are stored in bfloat16 as everywhere. It takes any rows, decode
rows and short chunks alike: a token sees its sequence's pages up to its own place. Only where all four products of
every layer are 4-bit, on one rank, with AVX2 and Numba; elsewhere model/decoder.py's operators run every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tailrace.kernels import few_rows as kernels
from tailrace.kernels.few_rows import Int4Rows, Int8Rows, Layers, Places
from tailrace.kernels.paged_attention import PagedPool, RowSpan
from tailrace.model import quantized as blocks
from tailrace.model.config import ModelConfig
from tailrace.model.rope import frequencies
from tailrace.model.tensors import TensorTable

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FewRowsWeights:
    """head: the output projection; None if its type is another than Q8_0."""

    layers: Layers
    head: Int8Rows | None

    @property
    def num_bytes(self) -> int:
        return self.layers.num_bytes + (0 if self.head is None else self.head.num_bytes)


def pack(config: ModelConfig, tensors: TensorTable) -> FewRowsWeights | None:
    """Weights for few rows; None if this machine, or one of the tensors, does not allow it."""
    names = [f"layers.{i}." for i in range(config.num_layers)]
    products = [p + part + ".weight" for p in names for parts in _FUSED.values() for part in parts]
    has_other_bias = any(f"{p}{part}.bias" in tensors for p in names for part in ("o_proj", "gate_proj", "down_proj"))
    fits = all(tensors[name].kind in blocks.INT4_KINDS and kernels.packable(*tensors[name].shape) for name in products)
    if has_other_bias or not fits or config.head_dim % 2 or kernels.native() is None:
        return None
    packed: dict[str, Int4Rows] = {}
    for field, parts in _FUSED.items():
        layers = [_packed(tensors, [f"{p}{part}.weight" for part in parts]) for p in names]
        found = [layer for layer in layers if layer is not None]
        if len(found) < len(layers):
            return None
        packed[field] = Int4Rows(np.stack([p.codes for p in found]), np.stack([p.scales for p in found]))

    def vectors(*wanted: str) -> np.ndarray:
        return np.stack([np.concatenate([_vector(tensors, p + name) for name in wanted]) for p in names])

    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    has_bias, has_norms = f"{names[0]}q_proj.bias" in tensors, f"{names[0]}q_norm.weight" in tensors
    biases = vectors("q_proj.bias", "k_proj.bias", "v_proj.bias") if has_bias else np.zeros((0, width), np.float32)
    norms = vectors("q_norm.weight", "k_norm.weight") if has_norms else np.zeros((config.num_layers, 2, 0), np.float32)
    (qkv, o, gate_up, down) = packed.values()
    layers = Layers(
        input_norm=vectors("input_norm.weight"),
        qkv=qkv.codes,
        qkv_scales=qkv.scales,
        qkv_bias=biases,
        head_norms=norms.reshape(config.num_layers, 2, config.head_dim if has_norms else 0),
        o=o.codes,
        o_scales=o.scales,
        post_norm=vectors("post_norm.weight"),
        gate_up=gate_up.codes,
        gate_up_scales=gate_up.scales,
        down=down.codes,
        down_scales=down.scales,
        norm=_vector(tensors, "norm.weight"),
        windows=np.array([window or 0 for window in config.windows], np.int64),
        eps=np.float32(config.rms_norm_eps),
        scale=np.float32(config.head_dim**-0.5),
    )
    head = tensors.get("lm_head.weight", tensors["embed.weight"])
    fits = head.kind == "Q8_0" and kernels.packable(*head.shape)
    return FewRowsWeights(layers, kernels.pack_int8(*_int8(head.rows())) if fits else None)


def _int8(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    scale, values = blocks.q8_0_rows(rows)
    return values, scale


def _vector(tensors: TensorTable, name: str) -> np.ndarray:
    return blocks.dense(tensors[name], torch.float32).numpy()


def _packed(tensors: TensorTable, names: Sequence[str]) -> Int4Rows | None:
    groups = [blocks.int4_groups(tensors[name]) for name in names]
    codes, scale, zero = (torch.cat([getattr(g, field) for g in groups]) for field in ("codes", "scale", "zero"))
    return kernels.pack_int4(codes, scale, zero - 8 * scale)


class FewRows:
    """Runs steps of few tokens.

    Args:
        threads: two are used where they are asked for and rows can be dealt out, and by the output projection.
        max_rows: tokens up to which this is faster than the many rows' operators.
    """

    def __init__(
        self, config: ModelConfig, weights: FewRowsWeights, threads: int = 1, max_rows: int = kernels.MAX_ROWS
    ) -> None:
        native = kernels.native()
        assert native is not None  # pack() gives None without it
        self._native, self._weights, self.max_rows = native, weights, max_rows
        self._heads = config.num_heads
        self._frequencies = frequencies(config.rope, config.head_dim).numpy()
        self._factor = np.float32(config.rope.attention_factor)
        self._second = ThreadPoolExecutor(1, thread_name_prefix="few-rows") if threads > 1 else None

    def forward(
        self,
        embedded: torch.Tensor,
        rows: Sequence[RowSpan],
        pool: PagedPool,
        num_layers: int | None = None,
        threads: int = 1,
    ) -> torch.Tensor:
        """As Decoder.forward.

        Args:
            embedded: [tokens, hidden_size] float32, of all rows' new tokens; overwritten.
            threads: 2: each takes half of the rows, which are of different sequences.

        Returns:
            [tokens, hidden_size] float32 after the final norm.
        """
        layers = len(self._weights.layers.windows) if num_layers is None else num_layers
        kv = pool.kv.view(torch.int16).numpy().view(np.uint16)
        out = torch.empty_like(embedded)
        hidden, normed = embedded.numpy(), out.numpy()

        def run(rows: Sequence[RowSpan], at: slice) -> None:
            places = self._places(rows, pool.tokens_per_page)
            self._native.run_layers(hidden[at], layers, self._heads, self._weights.layers, places, kv, normed[at])

        half = len(rows) // 2 if threads > 1 else 0
        cut = sum(row.num_new for row in rows[:half])
        self._on_both(
            partial(run, rows[:half], slice(0, cut)) if half else None, partial(run, rows[half:], slice(cut, None))
        )
        return out

    def _on_both(self, other: Callable[[], None] | None, mine: Callable[[], None]) -> None:
        """Run both, `other` on the second thread if there is one; returns, and raises, when both have ended."""
        if other is None or self._second is None:
            if other is not None:
                other()
            mine()
            return
        second = self._second.submit(other)
        try:
            mine()
        finally:
            second.exception()  # it writes until it has ended
        second.result()

    def _places(self, rows: Sequence[RowSpan], tokens_per_page: int) -> Places:
        positions = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
        table = np.zeros((len(positions), int(positions.max()) // tokens_per_page + 1), np.int32)
        at = 0
        for row in rows:
            num_pages = (row.start + row.num_new - 1) // tokens_per_page + 1
            table[at : at + row.num_new, :num_pages] = row.pages[:num_pages]
            at += row.num_new
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        return Places(table, positions, np.cos(angles) * self._factor, np.sin(angles) * self._factor)

    @property
    def has_head(self) -> bool:
        """Whether `logits` works."""
        return self._weights.head is not None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] -> [rows, vocab_size] float32."""
        head = self._weights.head
        assert head is not None
        x = hidden.float().numpy()
        words, scales = np.empty(x.shape, np.int16), np.empty((len(x), x.shape[1] // kernels.GROUP, 2), np.float32)
        self._native.quantize_rows(x, words, scales)
        out = torch.empty(len(x), len(head.codes) * kernels.BLOCK)
        into, end = out.numpy(), len(head.codes)

        def multiply(first: int, last: int) -> None:
            self._native.int8_product(head.codes, head.scales, words, scales, into, first, last)

        half = end // 2 if self._second is not None else 0
        self._on_both(partial(multiply, 0, half) if half else None, partial(multiply, half, end))
        return out
