"""Conditional prefill: when a gen computes a prompt itself because that costs it less than a hand-off would.

Both sides are what the request takes of gen, for gen's time is what is scarce; what a ctx would compute is not weighed.

    here       its own prefill of the tokens that it lacks, behind the prefills that it has already been given, and, for
               each stream that runs there, the time by which those tokens hold it up
    hand-off   what one costs beside its bytes, and the bytes of the tokens that it lacks over the wire

All of it is measured: prefills by the worker (prefill_fit.py), wire and overhead of each pair by gen
(transfer/pair_costs.py). While one of them is not known nothing is computed here. Pure; it knows no worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.router.prefill_fit import Coefficients
from tailrace.transfer.messages import PairCost


@dataclass(frozen=True, slots=True)
class LocalView:
    """What is known of a gen that might prefill.

    Attributes:
        coefficients: of its prefills; None until somebody has measured any.
        pairs: what hand-offs to it have cost.
        bytes_per_token: of its pages.
        backlog_s: predicted prefill outstanding there.
        streams: requests that decode there.
        most: tokens that it computes in one pass.
    """

    coefficients: Coefficients | None
    pairs: Sequence[PairCost]
    bytes_per_token: float
    backlog_s: float
    streams: int
    most: int

    @property
    def known(self) -> bool:
        return self.coefficients is not None and any(pair.bytes_per_s > 0 for pair in self.pairs)


def local_s(view: LocalView, uncached: int, cached: int = 0) -> float:
    """Seconds that this prefill would take of the gen and of those who wait there; infinite while not known."""
    if view.coefficients is None:
        return math.inf
    each, a_token, a_pair, _ = view.coefficients
    tokens_s = uncached * (a_token + a_pair * (cached + 0.5 * uncached))
    return view.backlog_s + each + tokens_s * (1 + view.streams)


def handoff_s(view: LocalView, uncached: int) -> float:
    """Seconds that handing over the pages of these tokens would take, by the cheapest pair; 0 while not known."""
    costs = [p.overhead_s + uncached * view.bytes_per_token / p.bytes_per_s for p in view.pairs if p.bytes_per_s > 0]
    return min(costs, default=0.0)


def cheaper_here(view: LocalView, uncached: int, cached: int = 0) -> bool:
    """Whether the gen should compute the `uncached` tokens behind `cached` ones that it holds."""
    return view.known and uncached <= view.most and local_s(view, uncached, cached) <= handoff_s(view, uncached)


def ever_cheaper(view: LocalView) -> bool:
    """False if there is no number of tokens for which `cheaper_here` could hold, with whatever is cached before them:
    that only makes them dearer. Takes no longer than one question."""
    if view.coefficients is None:
        return any(pair.bytes_per_s > 0 for pair in view.pairs)  # the rest is known with anyone's first prefill
    each, a_token, a_pair, _ = view.coefficients
    streams = 1 + view.streams
    for pair in view.pairs:
        if pair.bytes_per_s > 0:  # the excess of here over this pair is quadratic in the tokens, with one least value
            slope = a_token * streams - view.bytes_per_token / pair.bytes_per_s
            curve = 0.5 * a_pair * streams
            at = view.most if not curve and slope < 0 else 1.0 if not curve else -slope / (2 * curve)
            at = min(max(at, 1.0), view.most)
            if view.backlog_s + each + at * (slope + curve * at) <= pair.overhead_s * (1 + 1e-9):
                return True
    return False


def threshold(view: LocalView, cached: int = 0) -> int:
    """The most tokens that it should compute behind `cached` ones, so that fewer are cheaper here too; 0: none.

    For whoever wants to see the rule.
    """
    low, high = 0, view.most
    if cheaper_here(view, high, cached):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cheaper_here(view, middle, cached) else (low, middle)
    return low


def reason(view: LocalView) -> str:
    """In words, with the figures: why the threshold is what it is."""
    if view.coefficients is None:
        return "no prefill has been measured"
    if not view.known:
        return "no hand-off has been measured"
    each, a_token, _, _ = view.coefficients
    return (
        f"here {1e3 * (view.backlog_s + each):.2f} ms and {1e3 * a_token * (1 + view.streams):.3f} ms a token "
        f"({view.streams} streams held up); a hand-off {1e3 * handoff_s(view, 0):.2f} ms and "
        f"{1e3 * (handoff_s(view, 1) - handoff_s(view, 0)):.3f} ms a token"
    )
