"""/cluster as tables for the terminal. It shows what the router says and decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

WORKER_COLUMNS = ("name", "condition", "phase", "duty", "address", "running", "queued", "pages", "load", "boot")


def render(cluster: dict[str, Any]) -> Iterator[Table]:
    """The cluster as a whole, its workers, its usable pairs."""
    whole = Table("cluster", "", title_justify="left")
    for key, value in cluster.items():
        if key not in ("pools", "pairs"):
            whole.add_row(key, _shown(value))
    for name, pool in cluster["pools"].items():
        whole.add_row(f"pages of {name}", _shown(pool["pages"]))
    yield whole
    workers = [_short(worker) for pool in cluster["pools"].values() for worker in pool["workers"]]
    yield _rows("workers", workers, WORKER_COLUMNS)
    yield _rows("pairs", cluster["pairs"], ("gen", "ctx", "codec"))


def _short(worker: dict[str, Any]) -> dict[str, Any]:
    """What fits a row: of its load only what is not 0, and of its pages how many are used."""
    load = {key: value for key, value in worker["load"].items() if value}
    return worker | {"pages": f"{_shown(worker['pages']['used'])} of {worker['pages']['total']}", "load": load or "-"}


def _rows(name: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table(*columns, title=name, title_justify="left")
    for row in rows:
        table.add_row(*(_shown(row.get(column, "")) for column in columns))
    return table


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(inner) for inner in value) or "-"
    return str(value)
