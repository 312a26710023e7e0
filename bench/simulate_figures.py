"""What is read off a simulation: goodput under limits, hits, imbalance, decision times, and who wins where.

A request is **good** if it finished, its first token came within the TTFT limit, and at most `slow_share` of its gaps
between tokens were longer than the gap limit. Refused ones were offered, so they are not good. **Goodput** is the
highest offered load, in requests a second and worker, at which TARGET of the offered requests are good, interpolated
between the two loads around it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simulate_trace import Request, ceiling, parts
from simulate_workers import replay
from simulate_world import GAP_LIMITS_S, Outcome, Setup

TARGET = 0.9
FAR_BEYOND = 0.6


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request is good."""

    ttft_s: float = 5.0
    gap_s: float = 0.05
    slow_share: float = 0.01

    @property
    def gap(self) -> int:
        return GAP_LIMITS_S.index(self.gap_s)


@dataclass(slots=True)
class Point:
    """One setup under one load."""

    speed: float
    offered: float  # requests/s and worker
    outcomes: list[Outcome]
    computed: list[int]  # prompt tokens by worker that prefills, of all parts
    stepped: Counter[float]
    place_s: list[float] = field(default_factory=list)
    choose_s: list[float] = field(default_factory=list)

    def good(self, limits: Limits) -> float:
        """Share of the offered requests."""
        gap = limits.gap
        return sum(o.within(limits.ttft_s, gap, limits.slow_share) for o in self.outcomes) / len(self.outcomes)

    @property
    def refused(self) -> float:
        return sum(o.status.startswith("refused") for o in self.outcomes) / len(self.outcomes)

    @property
    def hit(self) -> float:
        """Cached prompt tokens over all, of those that finished."""
        done = [o for o in self.outcomes if o.status == "finished"]
        return sum(o.cached for o in done) / max(1, sum(o.request.tokens for o in done))

    @property
    def imbalance(self) -> float:
        """The busiest worker's computed prompt tokens over the mean."""
        return max(self.computed) / statistics.mean(self.computed)

    def ttft(self, share: float) -> float:
        return quantile([o.ttft for o in self.outcomes if o.first_at >= 0], share)

    def first_gap(self, share: float) -> float:
        return quantile([o.first_gap for o in self.outcomes if o.first_gap >= 0], share)

    def step(self, share: float) -> float:
        """Seconds between two tokens, over all tokens but each request's first two."""
        total, seen = sum(self.stepped.values()), 0
        for seconds in sorted(self.stepped):
            seen += self.stepped[seconds]
            if seen >= share * total:
                return seconds
        return 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """By rank; 0 of nothing."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def point(setup: Setup, requests: Sequence[Request], workers: int, speed: float) -> Point:
    """Replay the trace, scaled to `workers` a pool at that speed; see simulate_trace.parts."""
    outcomes: list[Outcome] = []
    computed: list[int] = []
    found = Point(speed, 0.0, outcomes, computed, Counter())
    arriving_s = 0.0
    of_cluster = parts(requests, workers, speed)
    for of_part in of_cluster:
        world, ended = replay(setup, of_part)
        outcomes += ended
        computed += [w.computed for w in world.workers.values() if w.duty != "gen"]
        found.stepped.update(world.stepped)
        found.place_s += world.place_s
        found.choose_s += world.choose_s
        arriving_s += max(o.arrived for o in ended) - min(o.arrived for o in ended)
    found.offered = len(outcomes) / max(arriving_s, 1e-9) / (setup.ctx + setup.gen + setup.both)
    return found


def sweep(
    setup: Setup, requests: Sequence[Request], workers: int, speeds: Sequence[float], limits: Limits
) -> list[Point]:
    """One point a speed, rising, until a load is far beyond the goodput."""
    found: list[Point] = []
    for speed in speeds:
        found.append(point(setup, requests, workers, speed))
        if found[-1].good(limits) < FAR_BEYOND:
            break
    return found


def goodput(points: Sequence[Point], limits: Limits) -> float:
    """See the module; 0 if not even the lowest load has TARGET good, the highest load if all have."""
    before: tuple[float, float] | None = None
    for each in sorted(points, key=lambda p: p.offered):
        good = each.good(limits)
        if good < TARGET:
            if before is None:
                return 0.0
            load, share = before
            return load + (each.offered - load) * (share - TARGET) / (share - good)
        before = (each.offered, good)
    return before[0] if before is not None else 0.0


def reaches_end(points: Sequence[Point], limits: Limits) -> bool:
    """The highest load was still good: the goodput is at least that."""
    return max(points, key=lambda p: p.offered).good(limits) >= TARGET


def near(points: Sequence[Point], load: float) -> Point:
    """The point whose load is nearest."""
    return min(points, key=lambda p: abs(p.offered - load))


def best(sweeps: dict[str, list[Point]], limits: Limits) -> tuple[str, float]:
    """(label, goodput) of the best of some setups."""
    label = max(sweeps, key=lambda name: goodput(sweeps[name], limits))
    return label, goodput(sweeps[label], limits)


def crossing(ours: dict[str, list[Point]], theirs: dict[str, list[Point]], limits: Limits) -> float | None:
    """The gap limit, in seconds, from which on the best of theirs has at least our best goodput; None: never."""
    found: float | None = None
    for gap_s in reversed(GAP_LIMITS_S):
        at = replace(limits, gap_s=gap_s)
        if best(theirs, at)[1] < best(ours, at)[1]:
            return found
        found = gap_s
    return found


def infinite(requests: Sequence[Request], workers: int, speed: float) -> float:
    """Hit rate of a cache without limits that all workers of a part share."""
    of_cluster = parts(requests, workers, speed)
    tokens = [sum(r.tokens for r in part) for part in of_cluster]
    return sum(ceiling(part) * n for part, n in zip(of_cluster, tokens, strict=True)) / sum(tokens)


def table(title: str, sweeps: dict[str, list[Point]], limits: Limits) -> str:
    """A line a setup and load."""
    head = (
        "setup",
        "req/s/worker",
        "good",
        "refused",
        "hit",
        "imbalance",
        "TTFT p50",
        "p90",
        "first gap p90",
        "gap p50",
        "p99",
    )
    lines: list[Sequence[str]] = [head]
    for label, points in sweeps.items():
        for p in points:
            figures = (
                p.offered,
                p.good(limits),
                p.refused,
                p.hit,
                p.imbalance,
                p.ttft(0.5),
                p.ttft(0.9),
                p.first_gap(0.9),
                p.step(0.5),
                p.step(0.99),
            )
            lines.append((label, *(f"{v:.3g}" for v in figures)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = (
        "  ".join([line[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
    return f"\n{title}\n" + "\n".join(shown)
