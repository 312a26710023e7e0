"""How long a worker's prefill takes: a fit that follows what the worker itself has measured.

    seconds = a + b * uncached + c * uncached * (cached + uncached / 2) + d * others

a: what each prefill costs; b: a prompt token; c: a token that another one looks back at; d: a token of other requests
that was computed in between. No coefficient is negative. Newer samples count more (`memory`), what lies far off counts
less, and a run of samples that lie off in one direction means that the worker has changed: then the past is forgotten.
Where the samples do not tell, because there are none or all are alike, the prior decides.

Pure arithmetic, without a clock. It knows no worker and no request; its owner (workers.py) keeps one a worker and one a
duty. If the router dies its successor begins with the priors, and so does a worker that comes back with a new boot id.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from tailrace.transfer.messages import PrefillSample

Coefficients = tuple[float, float, float, float]
"""(a, b, c, d) of the module's formula: seconds; seconds a token; a token pair; a token of others."""

MEMORY = 64.0  # samples after which one counts for a third
LEAST_S = 1e-5  # no prefill takes less
_HUBER = 2.5  # deviations beyond so many usual ones count only as much as that many
_FIRST_SPREAD, _LEAST_SPREAD = 0.3, 0.02  # the usual deviation, relative
_SHIFT = 5  # so many samples in a row, all off in one direction: the worker has changed
_SHIFT_SPREADS, _SHIFT_RATIO = 3.0, 0.25  # what counts as off
_KEPT = 0.1  # of the past, then
_PRIOR_SIZES = (8, 128, 2048)  # requests for which the prior is believed, as if they had been measured
_PRIOR_WEIGHT, _PRIOR_FADES, _PRIOR_LEAST = 0.5, 4.0, 0.001  # of each; a quarter after so many samples; at least
_MOST_TOKENS, _MOST_S = 10**8, 1e5  # beyond them nothing is believed
_SETTLED = 4  # samples before deviations are judged
_RIDGE = 1e-9
_ERROR_WEIGHT = 0.05  # of the newest sample in the mean error


def plain(tokens_per_s: float) -> Coefficients:
    """The coefficients of a plain rate, above 0."""
    return (0.0, 1 / tokens_per_s, 0.0, 1 / tokens_per_s)


def predict_s(coefficients: Coefficients, uncached: int, cached: int = 0, others: int = 0) -> float:
    """Seconds of one prefill by the module's formula; at least LEAST_S."""
    a, b, c, d = coefficients
    seconds = a + uncached * (b + c * (cached + 0.5 * uncached)) + d * others
    return seconds if seconds > LEAST_S else LEAST_S


class PrefillFit:
    """One fit. `num_samples`: seen so far; `error`: mean of |predicted - measured| / measured, each predicted before it
    was learned from; 0 without samples."""

    def __init__(self, memory: float = MEMORY) -> None:
        self.num_samples = 0
        self.error = 0.0
        self._keep = 1 - 1 / memory
        self._sums = [0.0] * 14  # as _accumulate adds them
        self._spread = _FIRST_SPREAD
        self._side = 0  # samples in a row that lie off, positive above the prediction
        self._recent: deque[PrefillSample] = deque(maxlen=_SHIFT)
        self._fitted: Coefficients | None = None
        self._prior: Coefficients = plain(1.0)

    @property
    def known(self) -> Coefficients | None:
        """None without samples. Solved once for all samples that came together, when first asked for."""
        if self._fitted is None:
            self.solve()
        return self._fitted

    def solve(self) -> None:
        """Do what `known` would do when it is next asked: it takes a tenth of a millisecond."""
        if self._fitted is None and self.num_samples:
            self._fitted = self._solve(self._prior)

    def learn(self, samples: Iterable[PrefillSample], prior: Coefficients) -> list[float]:
        """Take in samples that came together.

        Returns:
            The error of each that makes sense: |predicted - measured| / measured, predicted before any of them.
        """
        errors: list[float] = []
        before = self.known or prior
        self._prior = prior
        for sample in samples:
            if _sane(sample):
                errors.append(self._learn(sample, before))
        return errors

    def _learn(self, sample: PrefillSample, before: Coefficients) -> float:
        predicted = predict_s(before, sample.uncached, sample.cached, sample.others)
        error = abs(predicted - sample.seconds) / sample.seconds
        off = (sample.seconds - predicted) / predicted
        self.num_samples += 1
        self.error += max(_ERROR_WEIGHT, 1 / self.num_samples) * (min(error, 10.0) - self.error)
        self._recent.append(sample)
        self._fitted = None
        settled = self.num_samples > _SETTLED
        if settled and self._shifted(off):
            self._begin_anew(before)
            return error
        self._sums = [value * self._keep for value in self._sums]
        if settled:
            usual = _HUBER * self._spread
            self._add(sample, predicted, min(1.0, usual / abs(off)) if off else 1.0)
            self._spread += 0.05 * (min(abs(off), 2 * usual) - self._spread)
            self._spread = max(self._spread, _LEAST_SPREAD)
        else:
            self._add(sample, sample.seconds, 1.0)
        return error

    def _shifted(self, off: float) -> bool:
        far = abs(off) > max(_SHIFT_SPREADS * self._spread, _SHIFT_RATIO)
        if not far:
            self._side = 0
        elif off > 0:
            self._side = max(self._side, 0) + 1
        else:
            self._side = min(self._side, 0) - 1
        return abs(self._side) >= _SHIFT

    def _begin_anew(self, before: Coefficients) -> None:
        """Only the last samples are of the worker as it is now. What was before still tells how its times grow with
        the prompt, so it is kept a little, as if it had been as fast as now."""
        self._side = 0
        ratio = self._ratio_to(before)
        past = [_KEPT * value / ratio for value in self._sums]
        self._sums = [value / ratio for value in past[:10]] + past[10:]
        for sample in self._recent:
            self._add(sample, sample.seconds, 1.0)

    def _ratio_to(self, coefficients: Coefficients) -> float:
        """By what the last samples differ from a prediction: the median of measured / predicted."""
        predicted = [(s.seconds, predict_s(coefficients, s.uncached, s.cached, s.others)) for s in self._recent]
        return statistics.median(seconds / each for seconds, each in predicted)

    def _add(self, sample: PrefillSample, scale: float, weight: float) -> None:
        """Deviations count relative to `scale` seconds, so that short prefills matter as much as long ones."""
        _accumulate(self._sums, sample, weight / scale**2)

    def _solve(self, prior: Coefficients) -> Coefficients:
        sums = self._sums[:]
        weight = max(_PRIOR_LEAST, _PRIOR_WEIGHT * (_PRIOR_FADES / (_PRIOR_FADES + self.num_samples)) ** 2)
        # Of the prior only the shape is taken once there are samples: how fast the worker is, they say.
        ratio = self._ratio_to(prior)
        for size in _PRIOR_SIZES:
            for others in (0, size):
                seconds = ratio * predict_s(prior, size, 0, others)
                _accumulate(sums, PrefillSample(size, 0, others, seconds), weight / seconds**2)
        a, b, c, d = _non_negative(sums)
        return (a, b, c, d)


def _sane(sample: PrefillSample) -> bool:
    counts = (sample.uncached - 1, sample.cached, sample.others)
    return all(0 <= count < _MOST_TOKENS for count in counts) and LEAST_S <= sample.seconds < _MOST_S


def _accumulate(sums: list[float], sample: PrefillSample, weight: float) -> None:
    """Add weight * x * x^T (its upper triangle, by rows) and weight * x * seconds; x: the formula's terms, first 1."""
    u, o, y = sample.uncached, sample.others, sample.seconds
    a = u * (sample.cached + 0.5 * u)
    wu, wa, wo = weight * u, weight * a, weight * o
    terms = (
        weight, wu, wa, wo, wu * u, wu * a, wu * o, wa * a, wa * o, wo * o,
        weight * y, wu * y, wa * y, wo * y,
    )  # fmt: skip
    for i, term in enumerate(terms):
        sums[i] += term


def _non_negative(sums: list[float]) -> list[float]:
    """Least squares with no coefficient below 0: the most negative one is set to 0 and the rest solved again."""
    (aa, ab, ac, ad, bb, bc, bd, cc, cd, dd), right = sums[:10], sums[10:]
    gram = ((aa, ab, ac, ad), (ab, bb, bc, bd), (ac, bc, cc, cd), (ad, bd, cd, dd))
    scale = [math.sqrt(gram[i][i]) or 1.0 for i in range(4)]
    used = [i for i in range(4) if gram[i][i] > 0]
    while used:
        matrix = [[gram[i][j] / (scale[i] * scale[j]) + (_RIDGE if i == j else 0.0) for j in used] for i in used]
        solved = _gauss(matrix, [right[i] / scale[i] for i in used])
        least = min(range(len(used)), key=lambda k: solved[k])
        if solved[least] >= 0:
            result = [0.0] * 4
            for k, i in enumerate(used):
                result[i] = solved[k] / scale[i]
            return result
        del used[least]
    return [0.0] * 4


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system in place."""
    n = len(right)
    for i in range(n):
        pivot = matrix[i][i]
        for j in range(i + 1, n):
            factor = matrix[j][i] / pivot
            if factor:
                for k in range(i, n):
                    matrix[j][k] -= factor * matrix[i][k]
                right[j] -= factor * right[i]
    for i in reversed(range(n)):
        right[i] = (right[i] - sum(matrix[i][k] * right[k] for k in range(i + 1, n))) / matrix[i][i]
    return right
