"""The Triton kernels of device_sampling.py, same signatures.

    _peaks    each piece of a row: its highest score and that one's lowest id, as one integer
    _sums     each piece: its whole weight                                  (not for greedy)
    _narrow   each row: a bound above which lies all that top-k and top-p keep, and the few ids above it (advanced)
    _choose   each row: the token

A score and its id make one 64-bit key, so that keys are in order of "higher score, then lower id" and no two are equal;
what top-k and top-p keep is all keys from some key on. `_narrow` halves the range of keys in which that one lies, a
pass over the row each time, until few enough ids are left to hold (_FEW) or the key is found; `_choose` goes on among
those. Nothing goes back to the host, and shapes alone decide what is launched. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.device_sampling import ADVANCED, SamplingRows, check_sampling

_PIECE = 4096  # ids of a piece of a row
_FEW = 2048  # ids that one program holds
_LOWEST = tl.constexpr(-(0x7F800001 << 32))  # no key is below: of -inf, and an id past all
_INFINITE = tl.constexpr(0x7F800000)
_NO_LIST = tl.constexpr(-1)


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order; -0 as 0, NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _unordered(order):
    """The reverse of _ordered."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(x, at):
    """int64: the higher score first, then the lower id."""
    return (_ordered(x).to(tl.int64) << 32) | (0xFFFFFFFF - at.to(tl.int64))


@triton.jit
def _score(key):
    return _unordered((key >> 32).to(tl.int32))


@triton.jit
def _token(key):
    return (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITE


@triton.jit
def _scaled(logits, at, n, top, inverse):
    """Scores over temperature, the highest 0; -inf past the row."""
    x = tl.load(logits + at, mask=at < n, other=float("-inf"))
    return (x - top) * inverse


@triton.jit
def _peaks(
    logits,  # pointer to float32 [rows, n], rows rise numbers apart
    peaks,  # pointer to int64 [rows, pieces]
    n,
    rise,
    PIECE: tl.constexpr,
):
    """grid (rows, pieces)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * rise + at, mask=at < n, other=float("-inf"))
    key = tl.where(at < n, _key(x, at), _LOWEST)
    tl.store(peaks + row * tl.num_programs(1) + piece, tl.max(key, 0))


@triton.jit
def _best(peaks, row, pieces, PIECES: tl.constexpr):
    """The key of a row's best id."""
    piece = tl.arange(0, PIECES)
    return tl.max(tl.load(peaks + row * pieces + piece, mask=piece < pieces, other=_LOWEST), 0)


@triton.jit
def _pick(
    peaks,  # pointer to int64 [rows, pieces]
    out,  # pointer to int32 or int64 [rows]
    pieces,
    PIECES: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    best = _best(peaks, row, pieces, PIECES)
    tl.store(out + row, tl.where(_is_finite(_score(best)), _token(best), -1).to(out.dtype.element_ty))


@triton.jit
def _sums(
    logits,  # pointer to float32 [rows, n], rows rise numbers apart
    peaks,  # pointer to int64 [rows, pieces]
    inverse,  # pointer to float32 [rows]
    sums,  # pointer to float64 [rows, pieces]
    n,
    rise,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """grid (rows, pieces)."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    factor = tl.load(inverse + row)
    if factor > 0:
        top = _score(_best(peaks, row, pieces, PIECES))
        at = piece * PIECE + tl.arange(0, PIECE)
        weights = tl.exp(_scaled(logits + row * rise, at, n, top, factor))
        tl.store(sums + row * pieces + piece, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def _uniform(seed, position, sample):
    """engine/philox.py: float64 in [0, 1) of counter (position, sample, 0, 0) and key `seed`."""
    low: tl.constexpr = 0xFFFFFFFF
    x0, x1 = position & low, sample & low
    x2, x3 = x0 * 0, x0 * 0
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in tl.static_range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        y0, y2 = ((p1 >> 32) & low) ^ x1 ^ k0, ((p0 >> 32) & low) ^ x3 ^ k1
        x0, x1, x2, x3 = y0, p1 & low, y2, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return ((x0 >> 5).to(tl.float64) * 67108864.0 + (x1 >> 6).to(tl.float64)) / 9007199254740992.0


@triton.jit
def _measure(logits, n, top, factor, bound, PIECE: tl.constexpr):
    """(number, weight) of the ids whose keys are at least `bound`."""
    counts = tl.zeros((PIECE,), tl.int32)
    weights = tl.zeros((PIECE,), tl.float64)
    for start in range(0, n, PIECE):
        at = start + tl.arange(0, PIECE)
        scores = _scaled(logits, at, n, top, factor)
        kept = (at < n) & (_key(scores, at) >= bound)
        counts += kept.to(tl.int32)
        weights += tl.where(kept, tl.exp(scores), 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit
def _middle(low, high, step):
    """A key between: first by halving the score, which separates few from many soonest, then also by halving bits."""
    middle = low + ((high - low) >> 1)
    if (step < 8) | (step % 2 == 0):
        half = (tl.maximum(_score(low), -24.0) + _score(high)) * 0.5
        by_score = (_ordered(half).to(tl.int64)) << 32
        middle = tl.where((by_score > low) & (by_score < high), by_score, middle)
    return middle


@triton.jit
def _halve(logits, n, top, factor, low, high, count, number, weight, few, PIECE: tl.constexpr):
    """(key, ids from it on): the last key from which on there are `number` ids of `weight`, or one before it.

    low: a key from which on there are, `count` ids.  high: one from which on there are not. Ends when at most `few` ids
    are left.
    """
    step = 0
    while (high - low > 1) & (count > few):
        middle = _middle(low, high, step)
        there, heavy = _measure(logits, n, top, factor, middle, PIECE)
        enough = (there >= number) & (heavy >= weight)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        count = tl.where(enough, there, count)
        step += 1
    return low, count


@triton.jit
def _narrow(
    logits,  # pointer to float32 [rows, n], rows rise numbers apart
    peaks,  # pointer to int64 [rows, pieces]
    sums,  # pointer to float64 [rows, pieces]
    inverse,  # pointer to float32 [rows]
    top_k,  # pointer to int32 [rows]
    top_p,  # pointer to float64 [rows]
    lists,  # pointer to int64 [rows, FEW]: the keys from the bound on, in order of their ids
    states,  # pointer to int64 [rows, 2]: keys in the list, or _NO_LIST; the bound
    n,
    rise,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
):
    """grid (rows,). Without a list the bound is exact: what top-k and top-p keep are the keys from it on."""
    row = tl.program_id(0).to(tl.int64)
    factor, k, p = tl.load(inverse + row), tl.load(top_k + row), tl.load(top_p + row)
    best = _best(peaks, row, pieces, PIECES)
    top = _score(best)
    by_number = (k > 0) & (k < n)
    bound = tl.zeros((), tl.int64) + _LOWEST
    listed = tl.zeros((), tl.int32) + _NO_LIST
    if (factor > 0) & _is_finite(top) & (by_number | (p < 1.0)):
        logits += row * rise
        count = n
        high = tl.zeros((), tl.int64) + (1 << 32)  # above the best key: its score is 0
        if by_number:
            bound, count = _halve(logits, n, top, factor, bound, high, count, k, 0.0, FEW, PIECE)
        if (count > FEW) & (p < 1.0):
            piece = tl.arange(0, PIECES)
            whole = tl.sum(tl.load(sums + row * pieces + piece, mask=piece < pieces, other=0.0), 0)
            few = FEW
            if by_number:
                count, whole = _measure(logits, n, top, factor, bound, PIECE)
                few = 0  # what top-k keeps is already too long for the list, and its end is found
            bound, count = _halve(logits, n, top, factor, bound, high, count, 1, whole * p, few, PIECE)
            if by_number:
                count = FEW + 1
        if count <= FEW:
            listed = count
            lists += row * FEW
            before = tl.zeros((), tl.int32)
            for start in range(0, n, PIECE):
                at = start + tl.arange(0, PIECE)
                keys = _key(_scaled(logits, at, n, top, factor), at)
                kept = ((at < n) & (keys >= bound)).to(tl.int32)
                tl.store(lists + before + tl.cumsum(kept, 0) - 1, keys, mask=kept == 1)
                before += tl.sum(kept, 0)
    tl.store(states + 2 * row, listed.to(tl.int64))
    tl.store(states + 2 * row + 1, bound)


@triton.jit
def _last_key(keys, weights, low, high, number, weight):
    """The last key from which on there are `number` keys of `weight`; there are from `low` on and not from `high`."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        kept = keys >= middle
        enough = (tl.sum(kept.to(tl.int32), 0) >= number) & (tl.sum(tl.where(kept, weights, 0.0), 0) >= weight)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _place(below, target, SIZE: tl.constexpr):
    """First of the rising sums below [SIZE] that exceeds target, or the last that has weight if rounding left none."""
    place = tl.sum((below <= target).to(tl.int32), 0)
    whole = tl.max(below, 0)
    return tl.where(place < SIZE, place, tl.sum((below < whole).to(tl.int32), 0))


@triton.jit
def _from_list(keys, there, whole, k, p, least, uniform, SIZE: tl.constexpr):
    """The token among keys [SIZE], in order of ids, of which those `there` count.

    whole: weight of the row.  least: min-p.
    """
    weights = tl.where(there, tl.exp(_score(keys).to(tl.float64)), 0.0)
    keys = tl.where(there, keys, _LOWEST)
    lowest = tl.min(tl.where(there, keys, 0x7FFFFFFFFFFFFFFF), 0)
    high = tl.max(keys, 0) + 1
    if (k > 0) & (k < tl.sum(there.to(tl.int32), 0)):
        lowest = _last_key(keys, weights, lowest, high, k, 0.0)
    if k > 0:
        whole = tl.sum(tl.where(keys >= lowest, weights, 0.0), 0)
    if p < 1.0:
        lowest = _last_key(keys, weights, lowest, high, 1, whole * p)
    kept = (keys >= lowest) & (weights >= least)
    below = tl.cumsum(tl.where(kept, weights, 0.0), 0)
    place = _place(below, uniform * tl.max(below, 0), SIZE)
    return tl.sum(tl.where(tl.arange(0, SIZE) == place, _token(keys), 0), 0)


@triton.jit
def _kept_weights(logits, at, n, top, factor, bound, least):
    scores = _scaled(logits, at, n, top, factor)
    weights = tl.where((at < n) & (_key(scores, at) >= bound), tl.exp(scores), 0.0).to(tl.float64)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def _from_row(logits, n, top, factor, bound, least, uniform, PIECE: tl.constexpr):
    """The token among all ids whose keys are at least `bound` and whose weights are at least `least`: two passes."""
    whole = tl.zeros((), tl.float64)
    for start in range(0, n, PIECE):
        whole += tl.sum(_kept_weights(logits, start + tl.arange(0, PIECE), n, top, factor, bound, least), 0)
    target = uniform * whole
    running, before = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    chosen = tl.zeros((), tl.int32)
    found = tl.zeros((), tl.int32)
    for start in range(0, n, PIECE):
        own = tl.sum(_kept_weights(logits, start + tl.arange(0, PIECE), n, top, factor, bound, least), 0)
        candidate = (found == 0) & (own > 0)  # the last that has weight stays if none exceeds
        chosen = tl.where(candidate, start, chosen)
        before = tl.where(candidate, running, before)
        running += own
        found = tl.where(candidate & (running > target), 1, found)
    at = chosen + tl.arange(0, PIECE)
    below = tl.cumsum(_kept_weights(logits, at, n, top, factor, bound, least), 0)
    return chosen + _place(below, target - before, PIECE)


@triton.jit
def _from_sums(logits, sums, pieces, n, top, factor, uniform, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """The token among all ids of a row, by the weights of its pieces."""
    piece = tl.arange(0, PIECES)
    below = tl.cumsum(tl.load(sums + piece, mask=piece < pieces, other=0.0), 0)
    target = uniform * tl.max(below, 0)
    chosen = _place(below, target, PIECES)
    before = tl.max(tl.where(piece < chosen, below, 0.0), 0)
    at = chosen * PIECE + tl.arange(0, PIECE)
    weights = tl.exp(_scaled(logits, at, n, top, factor)).to(tl.float64)
    return chosen * PIECE + _place(tl.cumsum(weights, 0), target - before, PIECE)


@triton.jit
def _choose(
    logits,  # as of _narrow
    peaks,
    sums,
    inverse,
    top_k,
    top_p,
    min_p,  # pointer to float64 [rows]
    seed,  # pointer to int64 [rows]
    position,
    sample,
    lists,  # as of _narrow; anything if not FILTERED
    states,
    out,  # pointer to int32 or int64 [rows]
    n,
    rise,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(inverse + row)
    best = _best(peaks, row, pieces, PIECES)
    top = _score(best)
    token = tl.where(_is_finite(top), _token(best), -1)
    if (factor > 0) & (token >= 0):
        uniform = _uniform(tl.load(seed + row), tl.load(position + row), tl.load(sample + row))
        logits += row * rise
        if FILTERED:
            least, listed, bound = tl.load(min_p + row), tl.load(states + 2 * row), tl.load(states + 2 * row + 1)
            if listed >= 0:
                slot = tl.arange(0, FEW)
                keys = tl.load(lists + row * FEW + slot, mask=slot < listed, other=0)
                k, p = tl.load(top_k + row), tl.load(top_p + row)
                piece = tl.arange(0, PIECES)
                whole = tl.sum(tl.load(sums + row * pieces + piece, mask=piece < pieces, other=0.0), 0)
                k = tl.where(k < n, k, 0)
                token = _from_list(keys, slot < listed, whole, k, p, least, uniform, FEW)
            elif (least > 0) | (bound > _LOWEST):
                token = _from_row(logits, n, top, factor, bound, least, uniform, PIECE)
            else:
                token = _from_sums(logits, sums + row * pieces, pieces, n, top, factor, uniform, PIECE, PIECES)
        else:
            token = _from_sums(logits, sums + row * pieces, pieces, n, top, factor, uniform, PIECE, PIECES)
    tl.store(out + row, token.to(out.dtype.element_ty))


# -------------------------------------------------------------------------------------------------------------- launch


def argmax_rows(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As device_sampling.argmax_rows."""
    check_sampling(logits, None, ADVANCED, out)
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if rows:
        pieces = triton.cdiv(n, _PIECE)
        _pick[(rows,)](_peaks_of(logits, pieces), out, pieces, PIECES=triton.next_power_of_2(pieces), num_warps=1)
    return out


def sample_rows(
    logits: torch.Tensor, params: SamplingRows, variant: str = ADVANCED, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As device_sampling.sample_rows; variant is not greedy."""
    check_sampling(logits, params, variant, out)
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if not rows:
        return out
    pieces = triton.cdiv(n, _PIECE)
    width, filtered, rise = triton.next_power_of_2(pieces), variant == ADVANCED, logits.stride(0)
    peaks = _peaks_of(logits, pieces)
    sums = torch.empty(rows, pieces, dtype=torch.float64, device=logits.device)
    _sums[(rows, pieces)](logits, peaks, params.inverse, sums, n, rise, PIECE=_PIECE, PIECES=width)
    lists, states = peaks, peaks
    if filtered:
        lists = torch.empty(rows, _FEW, dtype=torch.int64, device=logits.device)
        states = torch.empty(rows, 2, dtype=torch.int64, device=logits.device)
        _narrow[(rows,)](
            logits, peaks, sums, params.inverse, params.top_k, params.top_p, lists, states, n, rise, pieces,
            PIECE=_PIECE, PIECES=width, FEW=_FEW, num_warps=16,
        )  # fmt: skip
    _choose[(rows,)](
        logits, peaks, sums, params.inverse, params.top_k, params.top_p, params.min_p, params.seed, params.position,
        params.sample, lists, states, out, n, rise, pieces,
        PIECE=_PIECE, PIECES=width, FEW=_FEW, FILTERED=filtered, num_warps=8,
    )  # fmt: skip
    return out


def _peaks_of(logits: torch.Tensor, pieces: int) -> torch.Tensor:
    """[rows, pieces] int64: the key of each piece's best id."""
    peaks = torch.empty(len(logits), pieces, dtype=torch.int64, device=logits.device)
    _peaks[(len(logits), pieces)](logits, peaks, logits.shape[1], logits.stride(0), PIECE=_PIECE)
    return peaks
