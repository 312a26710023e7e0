"""A router's decision log, asked again with every policy: bench/simulate.py --decisions FILE.

    simulate.decisions.POLICY.same        share of the decisions in which that policy takes the same worker
    simulate.decisions.POLICY.predicted   mean of the seconds to the first token predicted for its choices, over that
                                          of the choices that were made
    simulate.decisions.error              median of |actual - predicted| / actual, of what was logged with both

Loads are those of the log, so this says how policies differ on the same snapshots, not what would have followed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from harness import Row, identity

from tailrace.router.decision_log import load
from tailrace.router.decisions import Entry, Replayed, replay
from tailrace.router.policies import POLICIES


def decision_rows(file: Path) -> list[Row]:
    """See the module."""
    entries = load(file)
    return rows_of(entries, identity(path="decision log", log=file.name, decisions=len(entries)))


def rows_of(entries: Sequence[Entry], what: dict[str, object]) -> list[Row]:
    rows: list[Row] = []
    for name in sorted(POLICIES):
        again = list(replay(entries, name))
        start = f"simulate.decisions.{name}"
        if not again:
            reason = "the log has no decision of a policy"
            rows.append(
                Row(f"{start}.same", None, "share", "higher", status="unsupported", reason=reason, identity=what)
            )
            continue
        same = sum(r.same for r in again) / len(again)
        rows.append(Row(f"{start}.same", same, "share", "higher", identity=what | {"policy": name}))
        rows.append(Row(f"{start}.predicted", _ratio(again), "ratio", "lower", identity=what | {"policy": name}))
    errors = [
        abs(e.outcome.ttft_s - e.decision.predicted_s) / e.outcome.ttft_s for e in entries if e.outcome.ttft_s > 0
    ]
    if errors:
        rows.append(Row("simulate.decisions.error", statistics.median(errors), "share", "lower", identity=what))
    return rows


def _ratio(again: Sequence[Replayed]) -> float:
    made = statistics.fmean(r.entry.decision.predicted_s for r in again)
    return statistics.fmean(r.predicted_s for r in again) / max(made, 1e-9)
