"""Attention of a step on a device: rows of one token, and chunks, over keys and values in pages.

    decode_attention(q, kv, layer, page_table, lengths, scale=..)                          one token a row
    prefill_attention(q, kv, layer, chunk_starts, context, chunk_pages, max_new, scale=..)  a chunk's tokens

The new tokens' keys and values are already in the pool (device_step.rotary_write). Indices are those of
device_plan.DevicePlan; they stay on the device, and shapes alone decide what is launched, so both may be captured in a
graph and replayed with other lengths and pages. On a GPU both run device_attention_triton.py, elsewhere the plain
twins, which are also what the kernels are compared with. Products of float32 inputs are exact float32 (no TF32).

Nothing past a row's length is read, so a page needs no clearing when it is begun. Padding (length 0, a chunk of no
tokens) comes out zero; so does a query that sees no key. Tokens of q behind the last chunk are left as they are in
`out`, zero if it is made here.

Knows no sequence; a wrong page number reads another's page, so tables are the caller's duty.
"""

from __future__ import annotations

import torch

from tailrace.kernels.device_plan import DecodeTasks

HEAD_DIMS = (16, 32, 64, 128, 256)  # powers of two that the kernels take
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tasks: DecodeTasks | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of one query a row over the row's first `lengths` tokens.

    Args:
        q: [rows, heads, dim], each row contiguous, in the pool's dtype.
        kv: the pool, contiguous [page, layer, k|v, kv_head, token, dim], float32, bfloat16 or float16.
        page_table: [rows, max_pages] int32, each row contiguous.
        lengths: [rows] int32, keys seen, own included; 0 is padding. At most max_pages * tokens of a page.
        window: positions seen, own included; None is all.
        sinks: [heads] float32: a logit a head that takes its share of the softmax and has no value.
        out: [rows, heads, dim] contiguous, of q's dtype; made here if None.
        tasks: DevicePlan.decode_tasks(rows) of the plan that the lengths are of, so that long rows are cut into more
            pieces than short ones; None cuts all alike. Decides who computes what, not what comes out.

    Returns:
        out.

    Raises:
        ValueError: a shape, dtype or stride that does not fit; names what is and what was expected.
    """
    if q.is_cuda:
        from tailrace.kernels import device_attention_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.decode_attention(
            q, kv, layer, page_table, lengths, scale=scale, window=window, sinks=sinks, out=out, tasks=tasks
        )
    check_decode(q, kv, layer, page_table, lengths, window, sinks, out, tasks)
    return plain_decode_attention(q, kv, layer, page_table, lengths, scale=scale, window=window, sinks=sinks, out=out)


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    chunk_starts: torch.Tensor,
    context: torch.Tensor,
    chunk_pages: torch.Tensor,
    max_new: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of the chunks' tokens, causal, over what stood before each chunk and its own tokens.

    Args:
        q: [tokens, heads, dim], each token contiguous, in the pool's dtype.
        kv: as of decode_attention.
        chunk_starts: [chunks + 1] int32: first token in q of each chunk, and the end of the last.
        context: [chunks] int32: tokens before the chunk.
        chunk_pages: [chunks, max_pages] int32, each row contiguous.
        max_new: no chunk has more tokens; decides what is launched.
        window, sinks: as of decode_attention.
        out: [tokens, heads, dim] contiguous, of q's dtype; made here if None.

    Returns:
        out.

    Raises:
        ValueError: as of decode_attention.
    """
    if q.is_cuda:
        from tailrace.kernels import device_attention_triton as kernels  # noqa: PLC0415 (an optional package)

        run = kernels.prefill_attention
    else:
        check_prefill(q, kv, layer, chunk_starts, context, chunk_pages, max_new, window, sinks, out)
        run = plain_prefill_attention
    return run(
        q, kv, layer, chunk_starts, context, chunk_pages, max_new, scale=scale, window=window, sinks=sinks, out=out
    )


# --------------------------------------------------------------------------------------------------------------- twins


def plain_decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tasks: DecodeTasks | None = None,
) -> torch.Tensor:
    """The twin: row by row, in float32, rounded once. It waits for the device."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for row, length in enumerate(lengths.tolist()):
        _attend(q[row : row + 1], kv, layer, page_table[row], length, scale, window, sinks, out[row : row + 1])
    return out


def plain_prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    chunk_starts: torch.Tensor,
    context: torch.Tensor,
    chunk_pages: torch.Tensor,
    max_new: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin: chunk by chunk, in float32, rounded once. It waits for the device."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts = chunk_starts.tolist()
    for chunk, (first, last, before) in enumerate(zip(starts, starts[1:], context.tolist(), strict=False)):
        if last - first > max_new:
            raise ValueError(f"chunk {chunk} has {last - first} tokens, max_new is {max_new}")
        length = before + last - first
        _attend(q[first:last], kv, layer, chunk_pages[chunk], length, scale, window, sinks, out[first:last])
    return out


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    pages: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """q, out: [n, heads, dim], the last n of a row's `length` tokens; pages: [max_pages]."""
    n, heads, dim = q.shape
    if not length or not n:
        out.zero_()
        return
    size, kv_heads = kv.shape[4], kv.shape[3]
    past = kv[pages[: -(-length // size)].long(), layer].float()  # [page, k|v, kv_head, token, dim]
    k, v = past.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length]
    queries = q.float().view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    logits = (queries @ k.transpose(1, 2)).view(kv_heads, -1, n, length) * scale
    query = torch.arange(length - n, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
        weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    attended = weights.reshape(kv_heads, -1, length) @ v
    out.copy_(attended.view(kv_heads, -1, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim))


# -------------------------------------------------------------------------------------------------------------- checks


def check_pool(q: torch.Tensor, kv: torch.Tensor, layer: int) -> None:
    """ValueError unless heads, dim, dtype, device and layer fit the pool."""
    if kv.dim() != 6 or kv.shape[2] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"a pool is contiguous [page, layer, k|v, kv_head, token, dim], not {tuple(kv.shape)} {kv.stride()}"
        )
    if not 0 <= layer < kv.shape[1]:
        raise ValueError(f"layer {layer} of a pool of {kv.shape[1]} layers")
    if q.dim() != 3 or q.shape[2] != kv.shape[5] or not q.shape[1] or q.shape[1] % kv.shape[3]:
        raise ValueError(f"q is [rows, heads, {kv.shape[5]}], heads a multiple of {kv.shape[3]}, not {tuple(q.shape)}")
    if kv.shape[5] not in HEAD_DIMS:
        raise ValueError(f"a head has {kv.shape[5]} numbers, one of {HEAD_DIMS} is expected")
    if q.dtype is not kv.dtype or q.dtype not in _DTYPES:
        raise ValueError(f"q is {q.dtype}, the pool {kv.dtype}: expected the same, of {_DTYPES}")
    if q.device != kv.device:
        raise ValueError(f"q is on {q.device}, the pool on {kv.device}")
    if q.stride()[1:] != (q.shape[2], 1) and q.numel():
        raise ValueError(f"q has strides {q.stride()}, expected (any, {q.shape[2]}, 1)")


def _check_rest(q: torch.Tensor, window: int | None, sinks: torch.Tensor | None, out: torch.Tensor | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} positions, expected at least 1")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype is not torch.float32):
        raise ValueError(f"sinks are {tuple(sinks.shape)} {sinks.dtype}, expected ({q.shape[1]},) torch.float32")
    if sinks is not None and not sinks.is_contiguous():
        raise ValueError(f"sinks have stride {sinks.stride()}, expected (1,)")
    if out is not None and (out.shape != q.shape or out.dtype is not q.dtype or not out.is_contiguous()):
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} {out.stride()}, expected contiguous {tuple(q.shape)} {q.dtype}"
        )


def _check_table(name: str, table: torch.Tensor, rows: int) -> None:
    if table.dim() != 2 or table.shape[0] != rows or table.dtype is not torch.int32 or not table.shape[1]:
        raise ValueError(f"{name} is {tuple(table.shape)} {table.dtype}, expected ({rows}, pages) torch.int32")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError(f"{name} has strides {table.stride()}, expected (any, 1)")


def _check_numbers(name: str, numbers: torch.Tensor, count: int) -> None:
    if numbers.shape != (count,) or numbers.dtype is not torch.int32 or not numbers.is_contiguous():
        raise ValueError(
            f"{name} are {tuple(numbers.shape)} {numbers.dtype} {numbers.stride()}, expected contiguous ({count},) "
            "torch.int32"
        )


def check_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    tasks: DecodeTasks | None = None,
) -> None:
    """ValueError unless these are arguments of decode_attention."""
    check_pool(q, kv, layer)
    _check_table("page_table", page_table, len(q))
    _check_numbers("lengths", lengths, len(q))
    _check_rest(q, window, sinks, out)
    if tasks is not None and (tasks.firsts.shape != (len(q), 2) or tasks.tasks.shape[1:] != (4,)):
        raise ValueError(
            f"tasks are {tuple(tasks.tasks.shape)} of {len(tasks.firsts)} rows, expected (n, 4) of {len(q)}"
        )
    if tasks is not None and not tasks.tasks.dtype == tasks.firsts.dtype == torch.int32:
        raise ValueError(f"tasks are {tasks.tasks.dtype} and {tasks.firsts.dtype}, expected torch.int32")


def check_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    chunk_starts: torch.Tensor,
    context: torch.Tensor,
    chunk_pages: torch.Tensor,
    max_new: int,
    window: int | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """ValueError unless these are arguments of prefill_attention."""
    check_pool(q, kv, layer)
    _check_table("chunk_pages", chunk_pages, len(context))
    _check_numbers("context", context, len(chunk_pages))
    _check_numbers("chunk_starts", chunk_starts, len(chunk_pages) + 1)
    if max_new < 0:
        raise ValueError(f"max_new is {max_new}, expected 0 or more")
    _check_rest(q, window, sinks, out)
