"""A device step's work between its products: residual and norm, rotary and the writing of keys, SwiGLU's gate.

    normed = add_rms_norm(hidden, part, weight, eps)           hidden += part;  norm of hidden
    q = rotary_write(qkv, cos, sin, slots, kv, layer, ...)     turned q; turned k, and v, go to their pages
    gated = silu_mul(gate_up)

What model/decoder.py does with several operators, each in one pass over memory. Inside all is float32, and results are
rounded once, so in bfloat16 they differ from the CPU path's, which rounds between its operators, by that rounding. On a
GPU these run device_step_triton.py, elsewhere the plain twins. Nothing is read back: all three may be captured.
"""

from __future__ import annotations

import torch
from torch.nn import functional

MAX_NORM_SIZE = 32768  # numbers of a row that one program of the norm holds
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_rms_norm(
    hidden: torch.Tensor,
    part: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """hidden += part, then hidden / sqrt(mean(hidden^2) + eps) * weight.

    Args:
        hidden: [rows, size] float32, contiguous, changed in place. The residual stays float32 whatever the model's
            dtype (model/decoder.py says why).
        part: [rows, size], each row contiguous, what a block gave; None adds nothing.
        weight: [size].
        dtype: of the result; part's if None, weight's without a part.

    Returns:
        [rows, size].

    Raises:
        ValueError: a shape, dtype or stride that does not fit; names what is and what was expected.
    """
    if hidden.is_cuda:
        from tailrace.kernels import device_step_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.add_rms_norm(hidden, part, weight, eps, dtype)
    check_add_rms_norm(hidden, part, weight)
    return plain_add_rms_norm(hidden, part, weight, eps, dtype)


def rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm q and k if asked to, turn both, write k and v into the pool.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, dim], each token contiguous, in the pool's dtype; q, then k, then v.
        cos, sin: [tokens, 1, dim] of any float dtype, contiguous, from kernels/rotary.rotary_rows (sin's first half
            negated). float32 keeps more of long positions than bfloat16.
        slots: [tokens] int64: page * tokens_per_page + place. Tokens of one step have different slots, but for padding,
            whose slots lie in scratch page 0.
        kv: the pool, contiguous [page, layer, k|v, kv_head, token, dim].
        q_norm, k_norm: [dim], both or neither: RMSNorm weights over a head, applied before turning.
        eps: of those norms.

    Returns:
        q: [tokens, heads, dim].

    Raises:
        ValueError: as of add_rms_norm.
    """
    if qkv.is_cuda:
        from tailrace.kernels import device_step_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.rotary_write(qkv, cos, sin, slots, kv, layer, q_norm, k_norm, eps)
    check_rotary_write(qkv, cos, sin, slots, kv, layer, q_norm, k_norm)
    return plain_rotary_write(qkv, cos, sin, slots, kv, layer, q_norm, k_norm, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [rows, 2 * n], each row contiguous, gate first.

    Returns:
        [rows, n].

    Raises:
        ValueError: as of add_rms_norm.
    """
    if gate_up.is_cuda:
        from tailrace.kernels import device_step_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.silu_mul(gate_up)
    check_silu_mul(gate_up)
    return plain_silu_mul(gate_up)


# --------------------------------------------------------------------------------------------------------------- twins


def plain_add_rms_norm(
    hidden: torch.Tensor,
    part: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The twin."""
    if part is not None:
        hidden += part.float()
    dtype = dtype or (weight if part is None else part).dtype
    return _normed(hidden, weight, eps).to(dtype)


def plain_rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The twin."""
    kv_heads, size = kv.shape[3], kv.shape[4]
    heads = qkv.shape[1] - 2 * kv_heads
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    turned = []
    for x, weight in ((q.float(), q_norm), (k.float(), k_norm)):
        normed = x if weight is None else _normed(x, weight, eps)
        turned.append(normed * cos.float() + normed.roll(x.shape[-1] // 2, -1) * sin.float())
    page, place = slots // size, slots % size
    kv[page, layer, 0, :, place] = turned[1].to(kv.dtype)
    kv[page, layer, 1, :, place] = v
    return turned[0].to(qkv.dtype)


def plain_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin."""
    gate, up = gate_up.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


# -------------------------------------------------------------------------------------------------------------- checks


def check_add_rms_norm(hidden: torch.Tensor, part: torch.Tensor | None, weight: torch.Tensor) -> None:
    """ValueError unless these are arguments of add_rms_norm."""
    if hidden.dim() != 2 or hidden.dtype is not torch.float32 or not hidden.is_contiguous():
        raise ValueError(
            f"hidden is {tuple(hidden.shape)} {hidden.dtype} {hidden.stride()}, expected contiguous [rows, size] "
            "torch.float32"
        )
    if not 1 <= hidden.shape[1] <= MAX_NORM_SIZE:
        raise ValueError(f"hidden has rows of {hidden.shape[1]} numbers, expected 1 to {MAX_NORM_SIZE}")
    if part is not None and (part.shape != hidden.shape or part.dtype not in _DTYPES):
        raise ValueError(f"part is {tuple(part.shape)} {part.dtype}, expected {tuple(hidden.shape)} of {_DTYPES}")
    if part is not None and part.stride(1) != 1 and part.shape[1] > 1:
        raise ValueError(f"part has strides {part.stride()}, expected (any, 1)")
    if weight.shape != hidden.shape[1:] or weight.dtype not in _DTYPES or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, expected contiguous ({hidden.shape[1]},) of {_DTYPES}"
        )


def check_rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    """ValueError unless these are arguments of rotary_write."""
    if kv.dim() != 6 or kv.shape[2] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"a pool is contiguous [page, layer, k|v, kv_head, token, dim], not {tuple(kv.shape)} {kv.stride()}"
        )
    if not 0 <= layer < kv.shape[1]:
        raise ValueError(f"layer {layer} of a pool of {kv.shape[1]} layers")
    tokens, kv_heads, dim = qkv.shape[0], kv.shape[3], kv.shape[5]
    if qkv.dim() != 3 or qkv.shape[2] != dim or qkv.shape[1] <= 2 * kv_heads or dim % 2:
        raise ValueError(f"qkv is {tuple(qkv.shape)}, expected [tokens, heads + {2 * kv_heads}, {dim}], dim even")
    if qkv.dtype is not kv.dtype or qkv.dtype not in _DTYPES:
        raise ValueError(f"qkv is {qkv.dtype}, the pool {kv.dtype}: expected the same, of {_DTYPES}")
    if tokens and qkv.stride()[1:] != (dim, 1):
        raise ValueError(f"qkv has strides {qkv.stride()}, expected (any, {dim}, 1)")
    for name, turn in (("cos", cos), ("sin", sin)):
        if turn.shape != (tokens, 1, dim) or turn.dtype not in _DTYPES or not turn.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(turn.shape)} {turn.dtype} {turn.stride()}, expected contiguous ({tokens}, 1, {dim})"
            )
    if cos.dtype is not sin.dtype:
        raise ValueError(f"cos is {cos.dtype}, sin {sin.dtype}: expected the same")
    if slots.shape != (tokens,) or slots.dtype is not torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots are {tuple(slots.shape)} {slots.dtype}, expected contiguous ({tokens},) torch.int64")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"q_norm is {q_norm is not None and 'given'}, k_norm {k_norm is not None and 'given'}")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (dim,) or weight.dtype not in _DTYPES):
            raise ValueError(f"{name} is {tuple(weight.shape)} {weight.dtype}, expected ({dim},) of {_DTYPES}")


def check_silu_mul(gate_up: torch.Tensor) -> None:
    """ValueError unless this is an argument of silu_mul."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in _DTYPES:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)} {gate_up.dtype}, expected [rows, even] of {_DTYPES}")
    if gate_up.stride(1) != 1 and gate_up.shape[1] > 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}, expected (any, 1)")
