"""Plots of bench/simulate.py: good share over load, goodput over the gap limit, hits and TTFT over load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulate_figures import Limits, Point, goodput
from simulate_world import GAP_LIMITS_S


def _figure(title: str, across: str, up: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # only for plots
    except ImportError:
        raise SystemExit("--plots needs matplotlib: pip install '.[bench]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, file: Path) -> None:
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def over_load(name: str, sweeps: dict[str, list[Point]], limits: Limits, folder: Path) -> None:
    """NAME_good.png, NAME_hit.png, NAME_ttft.png: a line a setup over the offered load."""
    shown: list[tuple[str, str, Callable[[Point], float]]] = [
        (
            "good",
            f"share of offered requests within TTFT {limits.ttft_s} s, gaps {limits.gap_s} s",
            lambda p: p.good(limits),
        ),
        ("hit", "cached share of the prompt tokens", lambda p: p.hit),
        ("ttft", "TTFT p90, s", lambda p: p.ttft(0.9)),
        ("gap", "gap p99, s", lambda p: p.step(0.99)),
    ]
    for what, up, value in shown:
        figure, axes = _figure(name, "offered requests/s and worker", up)
        for label, points in sweeps.items():
            axes.plot([p.offered for p in points], [value(p) for p in points], marker="o", label=label)
        _save(figure, axes, folder / f"{name}_{what}.png")


def over_gap_limit(name: str, sweeps: dict[str, list[Point]], limits: Limits, folder: Path) -> None:
    """NAME_crossing.png: goodput over the gap limit."""
    figure, axes = _figure(name, "limit between tokens, ms", "goodput, requests/s and worker")
    for label, points in sweeps.items():
        values = [goodput(points, replace(limits, gap_s=gap_s)) for gap_s in GAP_LIMITS_S]
        axes.plot([1000 * gap_s for gap_s in GAP_LIMITS_S], values, marker="o", label=label)
    axes.set_xscale("log")
    _save(figure, axes, folder / f"{name}_crossing.png")
