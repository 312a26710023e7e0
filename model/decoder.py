"""The Llama family's forward pass over a mixed batch with paged keys and values.

It knows tensors and weights, not sequences: rows come laid out by the engine, with their positions and an attention
plan. It holds no state between steps; what it computes for a token depends on that token's row alone. As one rank of
several it computes its own heads and MLP columns, and all ranks run each step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tailrace.kernels.activation import silu_mul
from tailrace.kernels.norm import RmsNorm
from tailrace.kernels.paged_attention import AttentionPlan, PagedPool, RowSpan, paged_attention, write_kv
from tailrace.kernels.rotary import apply_rotary, rotary_rows
from tailrace.model.errors import WorkerError
from tailrace.model.few_rows import FewRows
from tailrace.model.rope import frequencies
from tailrace.model.weights import Embedding, LayerWeights, Weights

_ROUNDING = 2**-7  # two logits a bf16 rounding each from the truth differ by at most this of their size
_MOST_NEAR = 256  # more words than that side by side are no near tie


class _Layer:
    """One block's weights in the form its kernels want."""

    def __init__(self, weights: LayerWeights, eps: float, window: int | None) -> None:
        self.window = window
        self.input_norm = RmsNorm(weights.input_norm, eps)
        self.post_norm = RmsNorm(weights.post_norm, eps)
        self.q_norm = None if weights.q_norm is None else RmsNorm(weights.q_norm, eps)
        self.k_norm = None if weights.k_norm is None else RmsNorm(weights.k_norm, eps)
        self.qkv_proj, self.o_proj = weights.qkv_proj, weights.o_proj
        self.gate_up_proj, self.down_proj = weights.gate_up_proj, weights.down_proj


class Decoder:
    """Embedding, blocks, final norm and output projection.

    Args:
        weights: of the whole model, or of one rank.
        all_reduce: the sum over the ranks of what each has of a layer's output; None where one rank has all of it.
    """

    def __init__(self, weights: Weights, all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._all_reduce = all_reduce
        self.config = weights.config
        self.dtype = weights.dtype
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(self.config.windows))
        eps = self.config.rms_norm_eps
        self._embed, self._lm_head = weights.embed, weights.lm_head
        is_rounded = self.dtype is not torch.float32 and self.config.tie_embeddings
        self._head_rows = weights.embed if is_rounded else None  # of an untied one no plain copy is kept
        self._norm = RmsNorm(weights.norm, eps)
        self._layers = tuple(
            _Layer(layer, eps, window) for layer, window in zip(weights.layers, self.config.windows, strict=True)
        )
        self._few = (
            None if weights.few_rows is None else FewRows(self.config, weights.few_rows, torch.get_num_threads())
        )
        self._frequencies = frequencies(self.config.rope, self.config.head_dim)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: PagedPool,
        plan: AttentionPlan,
        num_layers: int | None = None,
        between: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Run the blocks and store the new keys and values in the pool.

        Args:
            ids, positions: [rows] int64. Rows past plan.num_tokens are padding: computed, stored nowhere.
            pool: pages in this decoder's dtype.
            num_layers: run only the first blocks (to warm up: all blocks run the same kernels); None runs all.
            between: called once a layer, after its keys and values are written and before any are read.

        Returns:
            [rows, hidden_size] after the final norm.
        """
        config = self.config
        rows, heads, dim = len(ids), config.num_heads, config.head_dim
        cos, sin = rotary_rows(positions, self._frequencies, config.rope.attention_factor, self.dtype)
        # Whatever the dtype, the sum of all blocks' outputs is kept in float32: rounding it 60 times, each time to 8
        # bits of its growing size, lost a third of bf16's accuracy, and which of two near words won differed by CPU.
        hidden = self._embed(ids).float()
        for index, layer in enumerate(self._layers[:num_layers]):
            qkv = layer.qkv_proj(layer.input_norm(hidden)).view(rows, -1, dim)
            qk = qkv[:, : heads + config.num_kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk[:, :heads] = layer.q_norm(qk[:, :heads])
                qk[:, heads:] = layer.k_norm(qk[:, heads:])
            apply_rotary(qk, cos, sin)
            q, kv = qkv[:, :heads], qkv[:, heads:].view(rows, 2, config.num_kv_heads, dim)
            write_kv(kv, pool, index, plan)
            if between is not None:
                between()
            attended = paged_attention(q, kv, pool, index, layer.window, plan)
            hidden += self._whole(layer.o_proj(attended.view(rows, -1)))
            hidden += self._whole(layer.down_proj(silu_mul(layer.gate_up_proj(layer.post_norm(hidden)))))
        return self._norm(hidden)

    @property
    def max_few(self) -> int:
        """Tokens of a step up to which `forward_few` runs it; 0 if it cannot."""
        return 0 if self._few is None else self._few.max_rows

    def forward_few(
        self,
        ids: torch.Tensor,
        rows: Sequence[RowSpan],
        pool: PagedPool,
        num_layers: int | None = None,
        threads: int = 1,
    ) -> torch.Tensor:
        """As `forward` for at most `max_few` tokens in all, on the quantized weights and without a plan.

        Args:
            ids: [tokens] int64, those of all rows, each of another sequence.
            threads: with 2 the rows are dealt out, if torch had as many threads when this decoder was made.

        Returns:
            [tokens, hidden_size] float32.
        """
        if self._few is None:
            raise WorkerError("this decoder has no weights for few rows")
        return self._few.forward(self._embed(ids).float(), rows, pool, num_layers, threads)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole model, not one rank's share."""
        return self._all_reduce is None

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks. part: [rows, hidden_size], this rank's."""
        return part if self._all_reduce is None else self._all_reduce(part)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] from `forward` -> [rows, vocab_size] float32. Only at the rank that samples."""
        if self._lm_head is None:
            raise WorkerError("this rank has no output projection: only rank 0 samples")
        if self._few is not None and self._few.has_head and len(hidden) <= self._few.max_rows:
            return self._few.logits(hidden)  # nearer to the weights than what is settled below
        hidden = hidden.to(self.dtype)
        logits = self._lm_head(hidden).float()
        if self._head_rows is not None:
            _settle_near_ties(logits, hidden, self._head_rows)
        return logits


def _settle_near_ties(logits: torch.Tensor, hidden: torch.Tensor, head_rows: Embedding) -> None:
    """Compute anew, in float32, each row's largest logit and those that rounding to bf16 may have put beside it.

    At 25, where a model's best logits lie, bf16 knows no step below 0.125: words that near are equal, and the lower id
    would win. logits: [rows, vocab_size] float32, changed in place.
    """
    top = logits.amax(-1, keepdim=True)
    row, token = (logits >= top - top.abs() * _ROUNDING).nonzero(as_tuple=True)
    if len(logits) < len(token) <= _MOST_NEAR * len(logits):
        logits[row, token] = (head_rows(token).float() * hidden[row].float()).sum(-1)
