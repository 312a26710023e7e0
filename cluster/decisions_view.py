"""Tables of `tailrace replay-decisions`: what was predicted and came, and what another policy would have chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from tailrace.router.decisions import Entry, replay


def render(entries: Sequence[Entry], policy: str) -> Iterator[Table]:
    """Raises ConfigError if there is no such policy."""
    replayed = list(replay(entries, policy))
    told = [entry for entry in entries if entry.outcome.ttft_s > 0]
    title = f"{len(entries)} placements, {len(replayed)} of them by a policy"
    table = Table("seconds to the first token", "median", "90 %", "mean", title=title, title_justify="left")
    rows = {
        "predicted, as placed": [r.entry.decision.predicted_s for r in replayed],
        f"predicted, by {policy}": [r.predicted_s for r in replayed],
        "measured, as placed": [entry.outcome.ttft_s for entry in told],
    }
    for name, values in rows.items():
        table.add_row(name, *_shown(values))
    same = sum(r.same for r in replayed)
    table.caption = f"{policy} chooses the same worker in {same} of {len(replayed)}"
    yield table


def _shown(values: list[float]) -> list[str]:
    if not values:
        return ["-"] * 3
    values = sorted(values)
    at = [values[len(values) // 2], values[min(len(values) - 1, len(values) * 9 // 10)], sum(values) / len(values)]
    return [f"{value:.4f}" for value in at]
