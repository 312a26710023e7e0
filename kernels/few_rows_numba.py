"""A decode step of the Llama family for few rows on an x86 CPU, in one native call: the kernels of few_rows.py.

PyTorch takes some 25 operators a layer, each of some microseconds, and its 4-bit product turns every code into a float
by itself. Here activations become 16-bit integers, 32 of them sharing a scale (2^-16 of the largest: far below what
bf16 rounds), so that one instruction multiplies 16 weights and adds them up in pairs without any rounding, and nothing
lies between two kernels. Compiled by Numba when first used, some seconds, and kept on disk for the next process.

Shapes and layouts are few_rows.py's. No fast-math flag that would let the compiler assume that nothing is NaN: a row
whose pages hold NaN must come out so. A row's result does not depend on the rows beside it, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tailrace.kernels.few_rows import Layers, Places

# few_rows.py's. Here again, because Numba keeps compiled code by this file alone.
GROUP = 32  # weights of a row with one scale
BLOCK = 16  # outputs computed together: two registers of 8
_LANES = 8

_FAST = {"reassoc", "contract", "arcp", "nsz"}

# ------------------------------------------------------------------------------------------- products, vector by vector

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _WORDS = ir.VectorType(_I8, 2 * _LANES), ir.VectorType(_I16, 2 * _LANES)
_INTS, _FLOATS, _HALVES = (ir.VectorType(t, _LANES) for t in (_I32, _F32, ir.HalfType()))
_ZERO_INTS, _ZERO_FLOATS = ir.Constant(_INTS, [0] * _LANES), ir.Constant(_FLOATS, [0.0] * _LANES)

Array: TypeAlias = np.ndarray
Builder: TypeAlias = Any  # llvmlite's builder, values and types say nothing to a type checker
Value: TypeAlias = Any
Type: TypeAlias = Any


def _at(b: Builder, base: Value, offset: Value, kind: Type) -> Value:
    return b.inttoptr(b.add(base, offset), kind.as_pointer())


def _load(b: Builder, base: Value, offset: Value, kind: Type) -> Value:
    loaded = b.load(_at(b, base, offset, kind))
    loaded.align = 1
    return loaded


def _int(value: int) -> Value:
    return ir.Constant(_I64, value)


def _everywhere(b: Builder, x: Value, kind: Type) -> Value:
    """x in each of 8 lanes."""
    vector = b.insert_element(ir.Constant(ir.VectorType(kind, _LANES), ir.Undefined), x, ir.Constant(_I32, 0))
    return b.shuffle_vector(vector, vector, ir.Constant(_INTS, [0] * _LANES))


def _call(b: Builder, name: str, result: Type, *arguments: Value) -> Value:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def _nibbles(b: Builder, base: Value, offset: Value) -> list[Value]:
    """Codes of four pairs of columns, from words that hold one of each."""
    words = _load(b, base, offset, _WORDS)
    mask = ir.Constant(_WORDS, [15] * 2 * _LANES)

    def shifted(by: int) -> Value:
        return b.lshr(words, ir.Constant(_WORDS, [by] * 2 * _LANES))

    return [b.and_(words, mask), b.and_(shifted(4), mask), b.and_(shifted(8), mask), shifted(12)]


def _signed(b: Builder, base: Value, offset: Value) -> list[Value]:
    """Codes of one pair of columns, from signed bytes."""
    return [b.sext(_load(b, base, offset, _BYTES), _WORDS)]


def _block_product(rows: int, unpack: Callable[..., list[Value]], step: int, has_minimum: bool) -> Any:
    """BLOCK outputs of `rows` rows.

    unpack: codes of one register's 8 outputs, as a list of pairs of columns, from `step` bytes.
    """

    def emit(
        b: Builder, codes: Value, scales: Value, x: Value, x_scales: Value, groups: Value, y: Value, ld: Value
    ) -> None:
        parts = range(BLOCK // _LANES)
        sums = [[cgutils.alloca_once_value(b, _ZERO_FLOATS) for _ in parts] for _ in range(rows)]
        for row in sums:  # the allocation is hoisted out of the caller's loop, and its first value with it
            for place in row:
                b.store(_ZERO_FLOATS, place)
        pairs = len(unpack(b, codes, _int(0)))
        code_bytes = GROUP // 2 // pairs * step
        scale_bytes = 2 * _LANES * (2 if has_minimum else 1)
        with cgutils.for_range(b, groups) as loop:
            g = loop.index
            code_at, scale_at = (b.mul(g, _int(n * len(parts))) for n in (code_bytes, scale_bytes))
            x_at = [b.mul(b.add(g, b.mul(groups, _int(r))), _int(2 * GROUP)) for r in range(rows)]
            products = [[_ZERO_INTS for _ in parts] for _ in range(rows)]
            for first in range(0, GROUP // 2, pairs):
                unpacked = [
                    unpack(b, codes, b.add(code_at, _int(k * code_bytes + first // pairs * step))) for k in parts
                ]
                for n in range(pairs):
                    for r in range(rows):
                        pair = _load(b, x, b.add(x_at[r], _int(4 * (first + n))), _I32)
                        both = b.bitcast(_everywhere(b, pair, _I32), _WORDS)
                        for k in parts:
                            product = _call(b, "llvm.x86.avx2.pmadd.wd", _INTS, unpacked[k][n], both)
                            products[r][k] = b.add(products[r][k], product)
            for k in parts:
                at = b.add(scale_at, _int(k * scale_bytes))
                scale = b.fpext(_load(b, scales, at, _HALVES), _FLOATS)
                minimum = (
                    b.fpext(_load(b, scales, b.add(at, _int(2 * _LANES)), _HALVES), _FLOATS) if has_minimum else None
                )
                for r in range(rows):
                    of_row = b.mul(b.add(g, b.mul(groups, _int(r))), _int(8))
                    x_scale = _everywhere(b, _load(b, x_scales, of_row, _F32), _F32)
                    total = b.load(sums[r][k])
                    weighed = b.fmul(scale, x_scale)
                    total = _call(b, "llvm.fma.v8f32", _FLOATS, b.sitofp(products[r][k], _FLOATS), weighed, total)
                    if minimum is not None:
                        x_sum = _everywhere(b, _load(b, x_scales, b.add(of_row, _int(4)), _F32), _F32)
                        total = _call(b, "llvm.fma.v8f32", _FLOATS, minimum, x_sum, total)
                    b.store(total, sums[r][k])
        for r in range(rows):
            for k in parts:
                at = b.add(_int(4 * _LANES * k), b.mul(ld, _int(4 * r)))
                b.store(b.load(sums[r][k]), _at(b, y, at, _FLOATS)).align = 4

    @intrinsic
    def product(
        typing_context: Any, codes: Any, scales: Any, x: Any, x_scales: Any, groups: Any, y: Any, ld: Any
    ) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
            emit(builder, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return product


_int4_1, _int4_2, _int4_4 = (_block_product(rows, _nibbles, 4 * _LANES, True) for rows in (1, 2, 4))
_int8_1, _int8_2, _int8_4 = (_block_product(rows, _signed, 2 * _LANES, False) for rows in (1, 2, 4))


@intrinsic
def _float_of(typing_context: Any, bits: Any = None) -> Any:
    """The float32 that has these 32 bits."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(typing_context: Any, x: Any = None) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@njit(nogil=True, cache=True)
def int4_product(codes: Array, scales: Array, x: Array, x_scales: Array, y: Array) -> None:
    """few_rows.int4_product on quantized rows: x [rows, columns] int16, x_scales [rows, groups, 2] float32."""
    blocks, groups, rows, ld = codes.shape[0], codes.shape[1], y.shape[0], y.shape[1]
    for i in range(blocks):
        code, scale = codes[i].ctypes.data, scales[i].ctypes.data
        r = 0
        while r < rows:
            from_x, from_scales = x[r:].ctypes.data, x_scales[r:].ctypes.data
            to = y[r:].ctypes.data + 4 * BLOCK * i
            if rows - r >= 4:
                _int4_4(code, scale, from_x, from_scales, groups, to, ld)
                r += 4
            elif rows - r >= 2:
                _int4_2(code, scale, from_x, from_scales, groups, to, ld)
                r += 2
            else:
                _int4_1(code, scale, from_x, from_scales, groups, to, ld)
                r += 1


@njit(nogil=True, cache=True)
def int8_product(codes: Array, scales: Array, x: Array, x_scales: Array, y: Array, first: int, last: int) -> None:
    """few_rows.int8_product on quantized rows, of the blocks [first, last)."""
    groups, rows, ld = codes.shape[1], y.shape[0], y.shape[1]
    for i in range(first, last):
        code, scale = codes[i].ctypes.data, scales[i].ctypes.data
        r = 0
        while r < rows:
            from_x, from_scales = x[r:].ctypes.data, x_scales[r:].ctypes.data
            to = y[r:].ctypes.data + 4 * BLOCK * i
            if rows - r >= 4:
                _int8_4(code, scale, from_x, from_scales, groups, to, ld)
                r += 4
            elif rows - r >= 2:
                _int8_2(code, scale, from_x, from_scales, groups, to, ld)
                r += 2
            else:
                _int8_1(code, scale, from_x, from_scales, groups, to, ld)
                r += 1


@njit(nogil=True, cache=True, fastmath=_FAST)
def quantize_rows(x: Array, out: Array, out_scales: Array) -> None:
    """few_rows.quantize_rows; x may be wider than out."""
    rows, groups = out_scales.shape[0], out_scales.shape[1]
    for r in range(rows):
        for g in range(groups):
            largest, total = np.float32(0), np.float32(0)
            for k in range(g * GROUP, (g + 1) * GROUP):
                value = x[r, k]
                largest = max(largest, abs(value))
                total += value
            is_finite = abs(total) < np.float32(1e38) and largest < np.float32(1e37)
            inverse = np.float32(32767) / largest if is_finite and largest > np.float32(1e-30) else np.float32(0)
            whole = np.int32(0)
            for k in range(g * GROUP, (g + 1) * GROUP):
                word = np.int16(np.rint(x[r, k] * inverse)) if is_finite else np.int16(0)
                out[r, k] = word
                whole += np.int32(word)
            scale = largest / np.float32(32767) if is_finite else np.float32(np.nan)
            out_scales[r, g, 0] = scale
            out_scales[r, g, 1] = np.float32(whole) * scale


# --------------------------------------------------------------------------------------------- what lies between them


@njit(nogil=True, fastmath=_FAST, cache=True, inline="always")
def _exp(x: np.float32) -> np.float32:
    """e^x within 2 ulp for |x| <= 87; beyond, that of 87. The library's is not computed several at a time."""
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    whole = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * rest + np.float32(1.3981999507e-3)
    p = p * rest + np.float32(8.3334519073e-3)
    p = p * rest + np.float32(4.1665795894e-2)
    p = p * rest + np.float32(1.6666665459e-1)
    p = p * rest + np.float32(5.0000001201e-1)
    p = p * rest * rest + rest + np.float32(1.0)
    return p * _float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@njit(nogil=True, cache=True, fastmath=_FAST)
def rms_norm(x: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """x: [rows, n] -> out [rows, n]."""
    rows, n = x.shape
    for r in range(rows):
        total = np.float32(0)
        for k in range(n):
            total += x[r, k] * x[r, k]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(n) + eps)
        for k in range(n):
            out[r, k] = x[r, k] * factor * weight[k]


@njit(nogil=True, cache=True, fastmath=_FAST)
def _rotate_heads(
    qkv: Array, cos: Array, sin: Array, q_norm: Array, k_norm: Array, eps: np.float32, heads: int, kv_heads: int
) -> None:
    rows, dim = qkv.shape[0], 2 * cos.shape[1]
    half = dim // 2
    for r in range(rows):
        for head in range(heads + kv_heads):
            x = qkv[r, head * dim : (head + 1) * dim]
            if len(q_norm) > 0:
                weight = q_norm if head < heads else k_norm
                total = np.float32(0)
                for k in range(dim):
                    total += x[k] * x[k]
                factor = np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)
                for k in range(dim):
                    x[k] *= factor * weight[k]
            for k in range(half):
                a, b = x[k], x[k + half]
                x[k] = a * cos[r, k] - b * sin[r, k]
                x[k + half] = b * cos[r, k] + a * sin[r, k]


@njit(nogil=True, cache=True)
def _write(kv: Array, pool: Array, layer: int, table: Array, positions: Array) -> None:
    """kv: [rows, 2 * kv_heads * dim] float32 -> bfloat16 in the pool, rounded to even."""
    fields, kv_heads, size, dim = pool.shape[2], pool.shape[3], pool.shape[4], pool.shape[5]
    for r in range(kv.shape[0]):
        page, slot = table[r, positions[r] // size], positions[r] % size
        for field in range(fields):
            for head in range(kv_heads):
                to = pool[page, layer, field, head, slot]
                first = (field * kv_heads + head) * dim
                for k in range(dim):
                    value = kv[r, first + k]
                    bits = _bits_of(value)
                    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                    to[k] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@njit(nogil=True, cache=True, fastmath=_FAST)
def _attend(
    q: Array,
    pool: Array,
    layer: int,
    table: Array,
    positions: Array,
    window: int,
    scale: np.float32,
    scores: Array,
    out: Array,
) -> None:
    """q: [rows, at least heads * dim];  scores: [heads a KV head, keys] to work in;  out: [rows, heads * dim]."""
    kv_heads, size, dim = pool.shape[3], pool.shape[4], pool.shape[5]
    group = out.shape[1] // dim // kv_heads
    keys = np.empty(dim, np.float32)
    for r in range(q.shape[0]):
        end = positions[r] + 1
        begin = max(0, end - window) if window > 0 else 0
        for head in range(kv_heads):
            for at in range(begin, end):
                key = pool[table[r, at // size], layer, 0, head, at % size]
                for k in range(dim):
                    keys[k] = _float_of(np.uint32(key[k]) << np.uint32(16))
                for i in range(group):
                    query = q[r, (head * group + i) * dim : (head * group + i + 1) * dim]
                    total = np.float32(0)
                    for k in range(dim):
                        total += query[k] * keys[k]
                    scores[i, at - begin] = total * scale
            for i in range(group):
                row = scores[i, : end - begin]
                top = row[0]
                for at in range(1, len(row)):
                    top = max(top, row[at])
                total = np.float32(0)
                for at in range(len(row)):
                    # max() may pass over a NaN; so may the bounds of _exp
                    weight = _exp(row[at] - top) + np.float32(0) * row[at]
                    row[at] = weight
                    total += weight
                for at in range(len(row)):
                    row[at] /= total
            into = out[r, head * group * dim : (head + 1) * group * dim]
            for k in range(len(into)):
                into[k] = 0
            for at in range(begin, end):
                value = pool[table[r, at // size], layer, 1, head, at % size]
                for k in range(dim):
                    keys[k] = _float_of(np.uint32(value[k]) << np.uint32(16))
                for i in range(group):
                    weight = scores[i, at - begin]
                    for k in range(dim):
                        into[i * dim + k] += weight * keys[k]


@njit(nogil=True, cache=True, fastmath=_FAST)
def _silu_mul(gate_up: Array, out: Array) -> None:
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    for r in range(rows):
        for k in range(n):
            gate = gate_up[r, k]
            out[r, k] = gate / (np.float32(1.0) + _exp(-gate)) * gate_up[r, n + k]


@njit(nogil=True, cache=True, fastmath=_FAST)
def _add(x: Array, y: Array) -> None:
    for r in range(x.shape[0]):
        for k in range(x.shape[1]):
            x[r, k] += y[r, k]


@njit(nogil=True, cache=True)
def _product_of(x: Array, words: Array, word_scales: Array, codes: Array, scales: Array, y: Array) -> None:
    """x [rows, columns] through 16-bit activations in `words` and `word_scales`, which are at least as large."""
    rows, columns = x.shape
    groups = columns // GROUP
    of_rows = words[: rows * columns].reshape(rows, columns)
    row_scales = word_scales[: rows * groups * 2].reshape(rows, groups, 2)
    quantize_rows(x, of_rows, row_scales)
    int4_product(codes, scales, of_rows, row_scales, y)


@njit(nogil=True, cache=True)
def run_layers(
    hidden: Array, num_layers: int, heads: int, layers: Layers, places: Places, pool: Array, out: Array
) -> None:
    """few_rows.run_layers."""
    rows, size = hidden.shape
    kv_heads, dim = pool.shape[3], pool.shape[5]
    inner, own = layers.down.shape[2] * GROUP, heads * dim
    widest = max(size, inner, own)
    x, y = np.empty((rows, size), np.float32), np.empty((rows, size), np.float32)
    fused = np.empty((rows, own + 2 * kv_heads * dim), np.float32)
    attended = np.empty((rows, own), np.float32)
    wide, activated = np.empty((rows, 2 * inner), np.float32), np.empty((rows, inner), np.float32)
    scores = np.empty((heads // kv_heads, places.positions.max() + 1), np.float32)
    words, word_scales = np.empty(rows * widest, np.int16), np.empty(rows * widest // GROUP * 2, np.float32)
    for layer in range(num_layers):
        rms_norm(hidden, layers.input_norm[layer], layers.eps, x)
        _product_of(x, words, word_scales, layers.qkv[layer], layers.qkv_scales[layer], fused)
        if layers.qkv_bias.shape[0] > 0:
            for r in range(rows):
                for k in range(fused.shape[1]):
                    fused[r, k] += layers.qkv_bias[layer, k]
        norms = layers.head_norms[layer]
        _rotate_heads(fused, places.cos, places.sin, norms[0], norms[1], layers.eps, heads, kv_heads)
        # All rows' keys and values are there before any is read: rows may belong to one sequence.
        _write(fused[:, own:], pool, layer, places.table, places.positions)
        window = layers.windows[layer]
        _attend(fused, pool, layer, places.table, places.positions, window, layers.scale, scores, attended)
        _product_of(attended, words, word_scales, layers.o[layer], layers.o_scales[layer], y)
        _add(hidden, y)
        rms_norm(hidden, layers.post_norm[layer], layers.eps, x)
        _product_of(x, words, word_scales, layers.gate_up[layer], layers.gate_up_scales[layer], wide)
        _silu_mul(wide, activated)
        _product_of(activated, words, word_scales, layers.down[layer], layers.down_scales[layer], y)
        _add(hidden, y)
    rms_norm(hidden, layers.norm, layers.eps, out)
