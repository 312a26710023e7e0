"""From logits to a token: a pure function of (seed, sample index, tokens so far).

Order, for one row of logits:

    penalties -> logit_bias -> min_tokens mask -> grammar mask -> temperature -> top-k -> top-p -> min-p -> draw

Repetition penalty counts prompt and output, presence and frequency count output only. Logprobs are those of the model:
log-softmax of the row as it came in, before all of the above, so they do not depend on how the token was chosen.

The draw inverts the cumulative distribution over the kept tokens in rising id order: one uniform a token. Why this way:
that order is fixed, so noise of 1e-6 in the logits moves every boundary by about 1e-6 of probability, no two tokens
ever change places, and the token flips only if the uniform lies that close to one of its two boundaries; a walk in
order of probability would flip whenever two neighbours swap, and Gumbel needs a random number for each entry of the
vocabulary. `margin` gives the distance to the nearest boundary, filters included, for tests that compare runs.

Ties are broken alike everywhere: higher score first, then lower id. Nothing is sorted but what a filter keeps.

It knows rows of numbers and SamplerState, not requests. A row with NaN, or with nothing left to choose, gives NO_TOKEN:
that row's request fails, its neighbours do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.engine.philox import uniforms
from tailrace.engine.step import Logprob, SamplerState
from tailrace.model.sampling_params import SamplingParams

NO_TOKEN = -1
GREEDY_MARGIN = 1e-3  # of a logit, between the best two
SEEDED_MARGIN = 1e-5  # of probability, between the draw and a boundary

_RUN = 64  # entries whose largest one stands for them when the best few are looked for
_BLOCK = 256  # entries summed at once when the cumulative distribution is inverted
_MIN_TEMPERATURE = 1e-6  # below it 1 / temperature leaves float32; the result is greedy long before
_FIRST_NUCLEUS = 256


@dataclass(frozen=True, slots=True)
class Margin:
    """How far a row's choice is from being another one: in logits if greedy, else in probability."""

    greedy: bool
    distance: float

    @property
    def clear(self) -> bool:
        """False if float noise alone may change the token (the margin rule)."""
        return self.distance > (GREEDY_MARGIN if self.greedy else SEEDED_MARGIN)


class Sampler:
    """Draws tokens for the rows of a step. Stateless: all state is in the SamplerStates, which it only reads."""

    def sample(
        self, logits: torch.Tensor, states: Sequence[SamplerState], positions: Sequence[int]
    ) -> list[tuple[int, Logprob | None]]:
        """Draw one token a row.

        Args:
            logits: [n, vocab] float32 on the CPU; not changed.
            states: one a row; rows may share a request and differ in `sample`.
            positions: absolute position of the token being drawn, one a row.

        Returns:
            (token, its logprob if params.logprobs is not None) a row; token is NO_TOKEN if none can be drawn.
        """
        raw = logits.numpy()
        chosen = np.full(len(states), NO_TOKEN, np.int64)
        seeded: list[int] = []
        plain: list[int] = []
        for i, state in enumerate(states):
            if not state.params.greedy:
                seeded.append(i)
            elif changes_logits(state):
                chosen[i] = _argmax(adjusted(raw[i], state))
            else:
                plain.append(i)
        if plain:
            chosen[plain] = _argmax_rows(raw if len(plain) == len(states) else raw[plain])
        if seeded:
            draws = uniforms(
                [states[i].params.seed for i in seeded],
                [positions[i] for i in seeded],
                [states[i].sample for i in seeded],
            )
            for i, uniform in zip(seeded, draws, strict=True):
                row = adjusted(raw[i], states[i]) if changes_logits(states[i]) else raw[i]
                chosen[i] = _draw(row, states[i].params, float(uniform))
        return [(token, self._logprob(raw[i], token, states[i].params)) for i, token in enumerate(chosen.tolist())]

    def _logprob(self, row: np.ndarray, token: int, params: SamplingParams) -> Logprob | None:
        if params.logprobs is None or token == NO_TOKEN:
            return None
        return _row_logprob(row, token, params.logprobs)


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Logprobs of known tokens (prompt logprobs).

    Args:
        logits: [n, vocab] float32 on the CPU, row i from the position before tokens[i].
        tokens: n known tokens.
        num_top: alternatives a token, by falling logprob then rising id.
    """
    rows = logits.numpy()
    return [_row_logprob(rows[i], token, num_top) for i, token in enumerate(tokens)]


def margin(row: torch.Tensor, state: SamplerState, position: int) -> Margin:
    """Distance between the choice that `Sampler.sample` makes for this row [vocab] and the nearest other choice."""
    scores = row.numpy()
    if changes_logits(state):
        scores = adjusted(scores, state)
    params = state.params
    if params.greedy:
        best = best_ids(scores, 2)
        gap = math.inf if len(best) < 2 else float(scores[best[0]]) - float(scores[best[1]])
        return Margin(True, gap)
    uniform = float(uniforms([params.seed], [position], [state.sample])[0])
    kept, weights, edges = _kept(_scaled(scores, params), params)
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1])
    at = _search(cumulative, uniform)
    below = uniform - float(cumulative[at - 1]) / total if at else math.inf
    above = float(cumulative[at]) / total - uniform if at + 1 < len(kept) else math.inf
    distance = min(below, above)
    for edge in edges:
        distance = min(distance, max(edge.gap, min(below, above) - edge.weight))
    return Margin(False, distance)


# ------------------------------------------------------------------------------------------------------------- logits


def changes_logits(state: SamplerState) -> bool:
    """True if penalties, bias, the min_tokens mask or a grammar touch this row now."""
    params = state.params
    if state.grammar is not None or params.logit_bias or state.num_output_tokens < params.min_tokens:
        return True
    return params.needs_counts and bool(state.output_counts or state.prompt_counts)


def adjusted(row: np.ndarray, state: SamplerState) -> np.ndarray:
    """A copy of the row [vocab] after penalties, bias and both masks."""
    params = state.params
    row = row.copy()
    if params.repetition_penalty != 1.0:
        ids = np.fromiter(state.prompt_counts.keys() | state.output_counts.keys(), np.int64)
        penalty = np.float32(params.repetition_penalty)
        seen = row[ids]
        row[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if (params.presence_penalty or params.frequency_penalty) and state.output_counts:
        ids = np.fromiter(state.output_counts.keys(), np.int64)
        counts = np.fromiter(state.output_counts.values(), np.float32)
        row[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
    for token, bias in params.logit_bias:
        row[token] += np.float32(bias)
    barred = _barred(state, len(row))
    if state.grammar is not None:
        allowed = state.grammar.allowed()
        open_ids = allowed.copy()
        open_ids[barred] = False
        # Where only the end may come, it comes: nothing else is left to say.
        np.copyto(row, np.float32(-np.inf), where=~(open_ids if open_ids.any() else allowed))
    elif barred:
        row[barred] = -np.inf
    return row


def _barred(state: SamplerState, size: int) -> list[int]:
    """Ids that may not come yet: what would end the sample before min_tokens, and a grammar's EOS if it is ignored."""
    params = state.params
    early = state.num_output_tokens < params.min_tokens
    ids = [*state.eos_ids] if early or (state.grammar is not None and params.ignore_eos) else []
    return [t for t in (*ids, *(params.stop_token_ids if early else ())) if t < size]


def best_ids(row: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k highest entries of a row [vocab], by falling score then rising id. No NaN in it."""
    size = len(row)
    if k * _RUN < size:
        # The k-th largest of the runs' maxima is at most the k-th largest entry: only few entries reach it.
        peaks = np.maximum.reduceat(row, np.arange(0, size, _RUN))
        floor = np.partition(peaks, len(peaks) - k)[len(peaks) - k]
    else:
        floor = np.partition(row, size - k)[size - k] if k < size else -np.inf
    ids = np.flatnonzero(row >= floor)
    # One integer a token, falling score above rising id, sorts faster than a stable sort of floats.
    bits = (row[ids] + np.float32(0.0)).view(np.uint32)  # the sum makes -0 equal to 0
    rising = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = np.sort((rising << np.uint64(32)) | ids.astype(np.uint64))
    return (keys[:k] & np.uint64(0xFFFFFFFF)).astype(np.int64)


# --------------------------------------------------------------------------------------------------------------- choice


def _argmax(row: np.ndarray) -> int:
    """Lowest id of the highest entry; NO_TOKEN if that entry is NaN or infinite."""
    token = int(row.argmax())
    return token if math.isfinite(row[token]) else NO_TOKEN


def _argmax_rows(rows: np.ndarray) -> np.ndarray:
    tokens = rows.argmax(axis=1)
    return np.where(np.isfinite(rows[np.arange(len(rows)), tokens]), tokens, NO_TOKEN)


def _scaled(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Scores over temperature, shifted so that the highest is 0."""
    return (row - row.max()) * np.float32(1.0 / max(params.temperature, _MIN_TEMPERATURE))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw(row: np.ndarray, params: SamplingParams, uniform: float) -> int:
    if not math.isfinite(row.max()):
        return NO_TOKEN
    scores = _scaled(row, params)
    if not _filters(params):
        return _invert(np.exp(scores), uniform)
    kept, weights, _ = _kept(scores, params)
    return int(kept[_search(np.cumsum(weights), uniform)])


def _invert(weights: np.ndarray, uniform: float) -> int:
    """Id whose part of the cumulative weights [vocab] holds `uniform`; summed by blocks, since one row is long."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    target = uniform * float(blocks[-1])
    block = _search_value(blocks, target)
    start = block * _BLOCK
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _search_value(inside, target - (float(blocks[block - 1]) if block else 0.0))


def _search(cumulative: np.ndarray, uniform: float) -> int:
    return _search_value(cumulative, uniform * float(cumulative[-1]))


def _search_value(cumulative: np.ndarray, target: float) -> int:
    """First index whose cumulative weight exceeds target, or the last that has weight if rounding left none."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index < len(cumulative):
        return index
    return int(np.searchsorted(cumulative, cumulative[-1], side="left"))


# ------------------------------------------------------------------------------------------------------------ filters


@dataclass(frozen=True, slots=True)
class _Edge:
    """A token that a filter nearly took in or left out.

    Noise larger than `gap` (of a score, or of a sum of probabilities: what the filter compares) changes the kept set;
    that moves every boundary of the draw by at most `weight`, a probability.
    """

    gap: float
    weight: float


def _kept(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, list[_Edge]]:
    """What top-k, top-p and min-p leave of scaled scores [vocab]: ids rising, weights (float64), edges."""
    size = len(scores)
    edges: list[_Edge] = []
    if 0 < params.top_k < size:
        ids = best_ids(scores, params.top_k + 1)
        weights = np.exp(scores[ids].astype(np.float64))
        total = float(weights[:-1].sum())
        edges.append(_swap_edge(weights / total, params.top_k))
        ids, weights = ids[:-1], weights[:-1]
        if params.top_p < 1.0:
            ids, weights = _nucleus(ids, weights, total, params.top_p, edges)
    elif params.top_p < 1.0:
        ids, weights, total = _leading(scores, params.top_p)
        ids, weights = _nucleus(ids, weights, total, params.top_p, edges)
    else:
        ids = np.arange(size)
        weights = np.exp(scores.astype(np.float64))
    if params.min_p > 0.0:
        share = weights / float(weights.max())
        nearest = int(np.abs(share - params.min_p).argmin())
        gap = abs(math.log(float(share[nearest]) / params.min_p)) if share[nearest] else math.inf
        edges.append(_Edge(gap, float(weights[nearest] / weights.sum())))
        ids, weights = ids[share >= params.min_p], weights[share >= params.min_p]
    rising = np.argsort(ids)
    return ids[rising], weights[rising], edges


def _swap_edge(shares: np.ndarray, count: int) -> _Edge:
    """Last one in and first one out of falling shares, of which `count` are kept, could change places."""
    last, next_one = float(shares[count - 1]), float(shares[count])
    return _Edge(math.log(last / next_one) if next_one else math.inf, last)


def _leading(scores: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray, float]:
    """The best ids, falling, as many as hold more than top_p of the whole weight; their weights; the whole weight."""
    total = float(np.exp(scores).sum(dtype=np.float64))
    count = min(_FIRST_NUCLEUS, len(scores))
    while True:
        ids = best_ids(scores, count)
        weights = np.exp(scores[ids].astype(np.float64))
        if count == len(scores):
            return ids, weights, float(weights.sum())
        if float(weights.sum()) > top_p * total:
            return ids, weights, total
        count = min(count * 8, len(scores))


def _nucleus(
    ids: np.ndarray, weights: np.ndarray, total: float, top_p: float, edges: list[_Edge]
) -> tuple[np.ndarray, np.ndarray]:
    """The shortest leading part with at least top_p of the weight, at least one token; adds its edges."""
    shares = weights / total
    cumulative = np.cumsum(shares)
    count = min(int(np.searchsorted(cumulative, top_p, side="left")) + 1, len(ids))
    if count > 1:
        edges.append(_Edge(top_p - float(cumulative[count - 2]), float(shares[count - 1])))
    if count < len(ids):
        edges.append(_Edge(float(cumulative[count - 1]) - top_p, float(shares[count])))
        edges.append(_swap_edge(shares, count))
    return ids[:count], weights[:count]


# ----------------------------------------------------------------------------------------------------------- logprobs


def _row_logprob(row: np.ndarray, token: int, num_top: int) -> Logprob:
    highest = float(row.max())
    log_total = highest + math.log(float(np.exp(row - np.float32(highest)).sum(dtype=np.float64)))
    top = best_ids(row, min(num_top, len(row))) if num_top else ()
    return Logprob(token, float(row[token]) - log_total, tuple((int(t), float(row[t]) - log_total) for t in top))
