"""The simulator against what bench/routing.py measured: the same scene, simulated over live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import Row, read_rows
from simulate_checks import as_live
from simulate_trace import Request


def live_rows(requests: Sequence[Request], file: Path, placement: str, what: dict[str, object]) -> list[Row]:
    """Simulated over live, for what bench/routing.py wrote with --json."""
    live = read_rows(file)
    rows = []
    for blocks in (8000, 2000):
        found = as_live(requests, blocks, placement)
        figures = {"hit": found.hit, "ttft_p90": 1000 * found.ttft(0.9), "ttft_p50": 1000 * found.ttft(0.5)}
        for figure, value in (*figures.items(), ("imbalance", found.imbalance)):
            row = live.get(f"routing.{figure}.{blocks}")
            name = f"simulate.validate.{figure}.{blocks}"
            if row is None or not row.value:
                reason = f"{file.name} has no routing.{figure}.{blocks}"
                rows.append(Row(name, None, "ratio", "lower", status="unsupported", reason=reason, identity=what))
            else:
                values = {"simulated": value, "live": row.value}
                rows.append(Row(name, value / row.value, "ratio", "lower", identity=what | values))
    return rows
