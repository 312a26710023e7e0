"""The Llama family on a device: model/decoder.py's forward pass over kernels that a CUDA graph may capture.

A step is laid out in a DevicePlan's buffers, ids included; what is launched follows from shapes alone, nothing is read
back and nothing waits. As on the CPU the sum of all blocks' outputs is kept in float32, and what is computed for a
token depends on that token's row alone. It knows tensors and weights, not sequences, and holds no state between steps.

Logits come out of the last product in float32, unrounded: words that bfloat16 would make equal are told apart as
model/decoder.py does afterwards. On a GPU, float32 is exact float32 and bfloat16 products sum in float32
(`exact_products`).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tailrace.kernels.device_attention import HEAD_DIMS, decode_attention, prefill_attention
from tailrace.kernels.device_plan import DevicePlan, PlanShape
from tailrace.kernels.device_step import add_rms_norm, rotary_write, silu_mul
from tailrace.kernels.one_row import one_row_gated, one_row_linear, takes
from tailrace.kernels.rotary import rotary_rows
from tailrace.model.errors import ConfigError
from tailrace.model.linear import DenseLinear, Linear
from tailrace.model.rope import frequencies
from tailrace.model.weights import LayerWeights, Weights


def exact_products() -> None:
    """Have this process's GPU products sum in float32, and take float32 operands as they are."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x: [rows, in_features] -> [rows, out_features]."""
    if takes(x) and isinstance(linear, DenseLinear):
        return one_row_linear(x, linear.weight, linear.bias)
    return linear(x)


def _gated(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up_proj's output."""
    if takes(x) and isinstance(linear, DenseLinear) and linear.bias is None:
        return one_row_gated(x, linear.weight)
    return silu_mul(linear(x))


class DeviceDecoder:
    """Embedding, blocks, final norm and output projection, where the weights are.

    Args:
        weights: of the whole model, dense (load_weights with a device).
        max_positions: positions that a step may have, 0 to max_positions - 1.

    Raises:
        ConfigError: heads whose size the kernels do not take, or weights in a form that a device does not have.
    """

    def __init__(self, weights: Weights, max_positions: int) -> None:
        config = weights.config
        if config.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"device: heads of {config.head_dim} numbers, the kernels take {HEAD_DIMS}: use device cpu"
            )
        if not isinstance(weights.lm_head, DenseLinear):
            raise ConfigError("device: weights are not dense")
        self.config, self.dtype, self.device = config, weights.dtype, weights.norm.device
        self.num_bytes = weights.num_bytes
        self._embed, self._layers, self._norm = weights.embed, weights.layers, weights.norm
        self._head = weights.lm_head.weight
        positions = torch.arange(max_positions)
        # Made on the CPU, so that every worker turns by the same numbers; float32 also beside bfloat16 keys.
        turns = rotary_rows(
            positions, frequencies(config.rope, config.head_dim), config.rope.attention_factor, torch.float32
        )
        self._turns = torch.stack([turn[:, 0] for turn in turns]).to(self.device)  # [cos | sin, position, dim]

    def forward(self, plan: DevicePlan, shape: PlanShape, kv: torch.Tensor) -> torch.Tensor:
        """Run the blocks and store the new keys and values in the pool.

        Args:
            plan: filled; its ids [shape.tokens] are looked at, too. What is padding there is computed and ends up in
                scratch page 0.
            kv: the pool, [page, layer, k|v, kv_head, token, dim] in this decoder's dtype.

        Returns:
            [shape.tokens, hidden_size] after the final norm.
        """
        eps, tokens = self.config.rms_norm_eps, shape.tokens
        cos, sin = self._turns.index_select(1, plan.positions[:tokens]).unsqueeze(2).unbind(0)
        hidden, part = self._embed(plan.ids[:tokens]).float(), None
        attended = hidden.new_zeros(tokens, self.config.num_heads, self.config.head_dim, dtype=self.dtype)
        for index, layer in enumerate(self._layers):
            normed = add_rms_norm(hidden, part, layer.input_norm, eps, self.dtype)
            self._attend(layer, index, normed, (cos, sin), plan, shape, kv, attended)
            part = _product(layer.o_proj, attended.view(tokens, -1))
            normed = add_rms_norm(hidden, part, layer.post_norm, eps, self.dtype)
            part = _product(layer.down_proj, _gated(layer.gate_up_proj, normed))
        return add_rms_norm(hidden, part, self._norm, eps, self.dtype)

    def _attend(
        self,
        layer: LayerWeights,
        index: int,
        normed: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        plan: DevicePlan,
        shape: PlanShape,
        kv: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """normed: [tokens, hidden_size];  turns: cos, sin [tokens, 1, dim];  out: [tokens, heads, dim]."""
        config, rows, chunks = self.config, shape.decode_rows, shape.chunks
        scale, window = config.head_dim**-0.5, config.windows[index]
        qkv = _product(layer.qkv_proj, normed).view(len(normed), -1, config.head_dim)
        slots = plan.slots[: len(normed)]
        q = rotary_write(qkv, *turns, slots, kv, index, layer.q_norm, layer.k_norm, config.rms_norm_eps)
        if rows:
            decode_attention(
                q[:rows], kv, index, plan.page_table[:rows], plan.lengths[:rows],
                scale=scale, window=window, out=out[:rows], tasks=plan.decode_tasks(rows),
            )  # fmt: skip
        if chunks:
            prefill_attention(
                q[rows:], kv, index, plan.chunk_starts[: chunks + 1], plan.context[:chunks], plan.chunk_pages[:chunks],
                shape.max_new, scale=scale, window=window, out=out[rows:],
            )  # fmt: skip

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [rows, hidden_size] from `forward` -> [rows, vocab_size] float32, in `out` if it is given."""
        if hidden.is_cuda and self.dtype is not torch.float32:
            if out is None:
                out = torch.empty(len(hidden), len(self._head), dtype=torch.float32, device=hidden.device)
            if takes(hidden):
                return one_row_linear(hidden, self._head, None, out)
            return torch.ops.aten.mm.dtype_out(hidden, self._head.t(), torch.float32, out=out)
        logits = functional.linear(hidden.float(), self._head.float())  # the twin; in float32 nothing is copied
        return logits if out is None else out.copy_(logits)
