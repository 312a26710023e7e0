"""Rows of bench/transfer.py by page size and transport: a table, and plots where matplotlib is installed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Row

_PEERS = {"copy": "one memory copy", "nixl_one_block": "NIXL, one block", "nixl_per_page": "NIXL, a piece a page"}


def _rates(rows: Sequence[Row], sizes: Mapping[str, int]) -> dict[str, dict[int, float]]:
    """Label -> page bytes -> GB/s, ours by transport and each peer's."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        _, kind, *rest = row.name.split(".")
        if len(rest) != 1 or rest[0] not in sizes or row.status != "ok" or row.value is None:
            continue
        found.setdefault(kind, {})[sizes[rest[0]]] = row.value
        for key, label in _PEERS.items():
            if row.samples.get(key):
                found.setdefault(label, {}).setdefault(sizes[rest[0]], statistics.median(row.samples[key]))
    return found


def by_page_size(rows: Sequence[Row], sizes: Mapping[str, int]) -> str:
    """GB/s, a line a transport or peer, a column a page size; empty if there is none."""
    rates = _rates(rows, sizes)
    if not rates:
        return ""
    order = sorted(sizes.items(), key=lambda item: item[1])
    lines = [("GB/s", *(name for name, _ in order))]
    for label, values in rates.items():
        lines.append((label, *(f"{values[b]:.2f}" if b in values else "-" for _, b in order)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = (
        "  ".join([line[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
    return "\n" + "\n".join(shown)


def plot(rows: Sequence[Row], sizes: Mapping[str, int], folder: Path) -> None:
    """transfer_rates.png: GB/s over page size. transfer_against.png: our share of each peer's rate."""
    try:
        from matplotlib.figure import Figure  # only for plots
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install '.[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, values in _rates(rows, sizes).items():
        points = sorted(values.items())
        style = "--" if label in _PEERS.values() else "-"
        axes.plot([b for b, _ in points], [v for _, v in points], style, marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes a page", ylabel="GB/s of page bytes", title="64 MiB of pages")
    axes.set_xticks(sorted(sizes.values()), [name for name, _ in sorted(sizes.items(), key=lambda i: i[1])])
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(folder / "transfer_rates.png", dpi=120)
    shares = [(row.name, key, value) for row in rows if row.status == "ok" for key, value in row.against.items()]
    figure = Figure(figsize=(8, 0.3 * len(shares) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh([f"{name} / {key}" for name, key, _ in shares], [value for *_, value in shares])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="our value / its value")
    axes.invert_yaxis()
    figure.savefig(folder / "transfer_against.png", dpi=120)
