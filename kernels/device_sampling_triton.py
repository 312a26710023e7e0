"""The Triton kernels of device_sampling.py, same signatures.

    _peaks    each piece of a row: its highest score and that one's lowest id, as one integer
    _sums     each piece: its whole weight, and for filters how many ids and how much weight lie above some levels
    _narrow   each row: a range of keys with few ids in it, where the last key lies that top-k and top-p keep
    _bound    each row: that key
    _kept     each piece: the weight of what is kept
    _choose   each row: the token

Greedy rows take the first alone, rows without filters the first two and the last. A score and its id make one 64-bit
key, so that keys are in order of "higher score, then lower id" and no two are equal; what top-k and top-p keep is all
keys from some key on. `_narrow` begins between two levels and halves that range, a pass over the row each time, until
few enough ids are in it to hold (_FEW), mostly at once; `_bound` goes on among those. Nothing goes back to the host,
and shapes alone decide what is launched. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.device_sampling import ADVANCED, SamplingRows, check_sampling

_PIECE = 4096  # ids of a piece of a row
_FEW = 2048  # ids that one program holds
_LEVELS = tl.constexpr(16)  # scores below the highest, in units of the temperature: 0.1, 0.4, 0.9, .. 25.6
_LOWEST = tl.constexpr(-(0x7F800001 << 32))  # no key is below: of -inf, and an id past all
_INFINITE = tl.constexpr(0x7F800000)
_ABOVE_ALL = tl.constexpr(1 << 32)  # a key above that of a row's best id, whose score is 0
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
def _level(level):
    """The score of a level."""
    return (level + 1).to(tl.float32) * (level + 1).to(tl.float32) * -0.1


@triton.jit
def _sums(
    logits,  # pointer to float32 [rows, n], rows rise numbers apart
    peaks,  # pointer to int64 [rows, pieces]
    inverse,  # pointer to float32 [rows]
    sums,  # pointer to float64 [rows, pieces]
    numbers,  # pointer to int32 [rows, pieces, LEVELS]: ids at a level or above; anything if not FILTERED
    weights,  # pointer to float64 [rows, pieces, LEVELS], likewise
    n,
    rise,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """grid (rows, pieces)."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    factor = tl.load(inverse + row)
    if factor > 0:
        top = _score(_best(peaks, row, pieces, PIECES))
        at = piece * PIECE + tl.arange(0, PIECE)
        scores = _scaled(logits + row * rise, at, n, top, factor)
        powers = tl.exp(scores)
        own = row * pieces + piece
        tl.store(sums + own, tl.sum(powers.to(tl.float64), 0))
        if FILTERED:
            level = tl.arange(0, _LEVELS)
            number, weight = tl.zeros((_LEVELS,), tl.int32), tl.zeros((_LEVELS,), tl.float64)
            highest = (_score(tl.load(peaks + own)) - top) * factor
            for i in range(_LEVELS):
                bound = _level(tl.zeros((), tl.int32) + i)
                if highest >= bound:
                    above = scores >= bound
                    number = tl.where(level == i, tl.sum(above.to(tl.int32), 0), number)
                    whole = tl.sum(tl.where(above, powers, 0.0), 0)
                    weight = tl.where(level == i, whole.to(tl.float64), weight)
            tl.store(numbers + own * _LEVELS + level, number)
            tl.store(weights + own * _LEVELS + level, weight)


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
def _reaches(peak, top, factor, bound):
    """Whether a piece with this peak may have keys of at least `bound`."""
    return _key((_score(peak) - top) * factor, peak * 0) >= bound


@triton.jit
def _measure(logits, peaks, n, top, factor, bound, PIECE: tl.constexpr):
    """(number, weight) of the ids whose keys are at least `bound`."""
    number, weight = tl.zeros((PIECE,), tl.int32), tl.zeros((PIECE,), tl.float64)
    for start in range(0, n, PIECE):
        if _reaches(tl.load(peaks + start // PIECE), top, factor, bound):
            at = start + tl.arange(0, PIECE)
            scores = _scaled(logits, at, n, top, factor)
            kept = (at < n) & (_key(scores, at) >= bound)
            number += kept.to(tl.int32)
            weight += tl.where(kept, tl.exp(scores), 0.0).to(tl.float64)
    return tl.sum(number, 0), tl.sum(weight, 0)


@triton.jit
def _middle(low, high, step):
    """A key between, by halving the score in every other step and the bits in the others, so that either end comes."""
    middle = low + ((high - low) >> 1)
    if step % 2 == 0:
        half = (tl.maximum(_score(low), -64.0) + _score(high)) * 0.5
        by_score = _ordered(half).to(tl.int64) << 32
        middle = tl.where((by_score > low) & (by_score < high), by_score, middle)
    return middle


@triton.jit
def _between(numbers, weights, whole_number, number, weight):
    """(low key, ids from it on, high key, ids from it on, their weight).

    From low on there are `number` ids of `weight`, from high on not. numbers, weights: [LEVELS], of each level, rising.
    """
    level = tl.arange(0, _LEVELS)
    first = tl.sum(((numbers < number) | (weights < weight)).to(tl.int32), 0)  # level from which on there are enough
    keys = _ordered(_level(level)).to(tl.int64) << 32
    low = tl.max(tl.where(level == first, keys, _LOWEST), 0)
    low_number = tl.where(first < _LEVELS, tl.max(tl.where(level == first, numbers, 0), 0), whole_number)
    high = tl.where(first > 0, tl.min(tl.where(level == first - 1, keys, _ABOVE_ALL), 0), _ABOVE_ALL)
    high_number = tl.max(tl.where(level == first - 1, numbers, 0), 0)
    high_weight = tl.max(tl.where(level == first - 1, weights, 0.0), 0)
    return low, low_number, high, high_number, high_weight


@triton.jit
def _halve(
    logits, peaks, n, top, factor, low, low_number, high, high_number, high_weight, number, weight, few, both,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The range of _between, halved until at most `few` ids are in it, or from its low end on; that alone if `both`."""
    step = 0
    while (high - low > 1) & (low_number > few) & ((low_number - high_number > few) | both):
        middle = _middle(low, high, step)
        there, heavy = _measure(logits, peaks, n, top, factor, middle, PIECE)
        enough = (there >= number) & (heavy >= weight)
        low, low_number = tl.where(enough, middle, low), tl.where(enough, there, low_number)
        high, high_number = tl.where(enough, high, middle), tl.where(enough, high_number, there)
        high_weight = tl.where(enough, high_weight, heavy)
        step += 1
    return low, low_number, high, high_number, high_weight


@triton.jit
def _list(logits, peaks, lists, n, top, factor, low, high, PIECE: tl.constexpr):
    """Write the keys of [low, high)."""
    before = tl.zeros((), tl.int32)
    for start in range(0, n, PIECE):
        if _reaches(tl.load(peaks + start // PIECE), top, factor, low):
            at = start + tl.arange(0, PIECE)
            keys = _key(_scaled(logits, at, n, top, factor), at)
            kept = ((at < n) & (keys >= low) & (keys < high)).to(tl.int32)
            tl.store(lists + before + tl.cumsum(kept, 0) - 1, keys, mask=kept == 1)
            before += tl.sum(kept, 0)
    return before


@triton.jit
def _narrow(
    logits,  # pointer to float32 [rows, n], rows rise numbers apart
    peaks,  # pointer to int64 [rows, pieces]
    sums,  # pointer to float64 [rows, pieces]
    numbers,  # as of _sums
    weights,
    inverse,  # pointer to float32 [rows]
    top_k,  # pointer to int32 [rows]
    top_p,  # pointer to float64 [rows]
    lists,  # pointer to int64 [rows, FEW]: keys
    states,  # pointer to int64 [rows, 3]: keys in the list, or _NO_LIST; the bound, exact without a list; ids above all
    wanted,  # pointer to float64 [rows]: the weight that top-p keeps, less that above all in the list
    n,
    rise,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
):
    """grid (rows,). With both top-k and top-p a list holds all that top-k keeps."""
    row = tl.program_id(0).to(tl.int64)
    factor, k, p = tl.load(inverse + row), tl.load(top_k + row), tl.load(top_p + row)
    peaks += row * pieces
    sums += row * pieces
    top = _score(_best(peaks, row * 0, pieces, PIECES))
    by_number = (k > 0) & (k < n)
    low, above = tl.zeros((), tl.int64) + _LOWEST, tl.zeros((), tl.int32)
    listed, weight = tl.zeros((), tl.int32) + _NO_LIST, tl.zeros((), tl.float64)
    if (factor > 0) & _is_finite(top) & (by_number | (p < 1.0)):
        logits += row * rise
        piece = tl.arange(0, PIECES)
        place = (row * pieces + piece)[:, None] * _LEVELS + tl.arange(0, _LEVELS)[None, :]
        there = (piece < pieces)[:, None]
        number_of = tl.sum(tl.load(numbers + place, mask=there, other=0), 0)
        weight_of = tl.sum(tl.load(weights + place, mask=there, other=0.0), 0)
        both = by_number & (p < 1.0)
        number = tl.where(by_number, k, 1)
        whole = tl.sum(tl.load(sums + piece, mask=piece < pieces, other=0.0), 0)
        weight = tl.where(by_number, 0.0, whole * p)
        low, low_number, high, above, heavy = _between(number_of, weight_of, n, number, weight)
        low, low_number, high, above, heavy = _halve(
            logits, peaks, n, top, factor, low, low_number, high, above, heavy, number, weight, FEW, both, PIECE
        )
        if both & (low_number > FEW):  # more than a list holds, and their end is found; top-p goes the whole way too
            low_number, whole = _measure(logits, peaks, n, top, factor, low, PIECE)
            high = tl.zeros((), tl.int64) + _ABOVE_ALL
            low, low_number, high, above, heavy = _halve(
                logits, peaks, n, top, factor, low, low_number, high, above * 0, heavy * 0, 1, whole * p, 0, both, PIECE
            )
        elif high - low > 1:
            if low_number <= FEW:  # all from the low end on
                high, above, heavy = tl.zeros((), tl.int64) + _ABOVE_ALL, above * 0, heavy * 0
            listed = _list(logits, peaks, lists + row * FEW, n, top, factor, low, high, PIECE)
            weight -= heavy
    tl.store(states + 3 * row, listed.to(tl.int64))
    tl.store(states + 3 * row + 1, low)
    tl.store(states + 3 * row + 2, above.to(tl.int64))
    tl.store(wanted + row, weight)


@triton.jit
def _last_key(keys, weights, low, high, number, weight):
    """A key from which on stand the fewest of keys [..] that are `number`, of `weight`; from `low` on they are."""
    low_number, high_number = tl.sum((keys >= low).to(tl.int32), 0), tl.sum((keys >= high).to(tl.int32), 0)
    while (high - low > 1) & (low_number - high_number > 1):
        middle = low + ((high - low) >> 1)
        kept = keys >= middle
        there = tl.sum(kept.to(tl.int32), 0)
        enough = (there >= number) & (tl.sum(tl.where(kept, weights, 0.0), 0) >= weight)
        low, low_number = tl.where(enough, middle, low), tl.where(enough, there, low_number)
        high, high_number = tl.where(enough, high, middle), tl.where(enough, high_number, there)
    return low


@triton.jit
def _bound(
    lists,  # as of _narrow
    states,  # the bound becomes exact
    wanted,
    top_k,
    top_p,
    n,
    FEW: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    listed, low, above = tl.load(states + 3 * row), tl.load(states + 3 * row + 1), tl.load(states + 3 * row + 2)
    if listed > 0:
        slot = tl.arange(0, FEW)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        keys = tl.load(lists + row * FEW + slot, mask=slot < listed, other=_LOWEST - 1)
        weights = tl.where(slot < listed, tl.exp(_score(keys).to(tl.float64)), 0.0)
        high = tl.max(keys, 0) + 1
        if (k > 0) & (k < n):
            low = _last_key(keys, weights, low, high, k - above, 0.0)
            if p < 1.0:
                whole = tl.sum(tl.where(keys >= low, weights, 0.0), 0)
                low = _last_key(keys, weights, low, high, 1, whole * p)
        else:
            low = _last_key(keys, weights, low, high, 1 - above, tl.load(wanted + row))
        tl.store(states + 3 * row + 1, low)


@triton.jit
def _kept_weights(logits, at, n, top, factor, bound, least):
    """float64: the weights of ids `at` that filters keep, else 0.  least: min-p."""
    scores = _scaled(logits, at, n, top, factor)
    weights = tl.where((at < n) & (_key(scores, at) >= bound), tl.exp(scores), 0.0).to(tl.float64)
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def _kept(
    logits,  # as of _narrow
    peaks,
    inverse,
    min_p,  # pointer to float64 [rows]
    states,
    sums,  # pointer to float64 [rows, pieces], of what is kept
    n,
    rise,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """grid (rows, pieces)."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    factor, least, bound = tl.load(inverse + row), tl.load(min_p + row), tl.load(states + 3 * row + 1)
    if (factor > 0) & ((least > 0) | (bound > _LOWEST)):
        top = _score(_best(peaks, row, pieces, PIECES))
        whole = tl.zeros((), tl.float64)
        if _reaches(tl.load(peaks + row * pieces + piece), top, factor, bound):
            at = piece * PIECE + tl.arange(0, PIECE)
            whole = tl.sum(_kept_weights(logits + row * rise, at, n, top, factor, bound, least), 0)
        tl.store(sums + row * pieces + piece, whole)


@triton.jit
def _place(below, target, SIZE: tl.constexpr):
    """First of the rising sums below [SIZE] that exceeds target, or the last that has weight if rounding left none."""
    place = tl.sum((below <= target).to(tl.int32), 0)
    whole = tl.max(below, 0)
    return tl.where(place < SIZE, place, tl.sum((below < whole).to(tl.int32), 0))


@triton.jit
def _choose(
    logits,  # as of _narrow
    peaks,
    sums,  # pointer to float64 [rows, pieces], of what is kept
    inverse,
    min_p,  # as of _kept; anything if not FILTERED
    states,  # likewise
    seed,  # pointer to int64 [rows]
    position,
    sample,
    out,  # pointer to int32 or int64 [rows]
    n,
    rise,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
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
        least, bound = tl.zeros((), tl.float64), tl.zeros((), tl.int64) + _LOWEST
        if FILTERED:
            least, bound = tl.load(min_p + row), tl.load(states + 3 * row + 1)
        piece = tl.arange(0, PIECES)
        below = tl.cumsum(tl.load(sums + row * pieces + piece, mask=piece < pieces, other=0.0), 0)
        target = uniform * tl.max(below, 0)
        chosen = _place(below, target, PIECES)
        target -= tl.max(tl.where(piece < chosen, below, 0.0), 0)
        at = chosen * PIECE + tl.arange(0, PIECE)
        weights = _kept_weights(logits + row * rise, at, n, top, factor, bound, least)
        token = chosen * PIECE + _place(tl.cumsum(weights, 0), target, PIECE)
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
    numbers, weights, states = sums, sums, sums
    if filtered:
        numbers = torch.empty(rows, pieces, _LEVELS.value, dtype=torch.int32, device=logits.device)
        weights = torch.empty(rows, pieces, _LEVELS.value, dtype=torch.float64, device=logits.device)
    _sums[(rows, pieces)](
        logits, peaks, params.inverse, sums, numbers, weights, n, rise, PIECE=_PIECE, PIECES=width, FILTERED=filtered
    )
    if filtered:
        lists = torch.empty(rows, _FEW, dtype=torch.int64, device=logits.device)
        states = torch.empty(rows, 3, dtype=torch.int64, device=logits.device)
        wanted = torch.empty(rows, dtype=torch.float64, device=logits.device)
        _narrow[(rows,)](
            logits, peaks, sums, numbers, weights, params.inverse, params.top_k, params.top_p, lists, states, wanted,
            n, rise, pieces, PIECE=_PIECE, PIECES=width, FEW=_FEW, num_warps=16,
        )  # fmt: skip
        _bound[(rows,)](lists, states, wanted, params.top_k, params.top_p, n, FEW=_FEW, num_warps=8)
        _kept[(rows, pieces)](
            logits, peaks, params.inverse, params.min_p, states, sums, n, rise, PIECE=_PIECE, PIECES=width
        )
    _choose[(rows,)](
        logits, peaks, sums, params.inverse, params.min_p, states, params.seed, params.position, params.sample, out,
        n, rise, pieces, PIECE=_PIECE, PIECES=width, FILTERED=filtered, num_warps=8,
    )  # fmt: skip
    return out


def _peaks_of(logits: torch.Tensor, pieces: int) -> torch.Tensor:
    """[rows, pieces] int64: the key of each piece's best id."""
    peaks = torch.empty(len(logits), pieces, dtype=torch.int64, device=logits.device)
    _peaks[(len(logits), pieces)](logits, peaks, logits.shape[1], logits.stride(0), PIECE=_PIECE)
    return peaks
