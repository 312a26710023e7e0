"""/cluster as tables for the terminal. It shows what the router says and decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table


def render(cluster: dict[str, Any]) -> Iterator[Table]:
    """One table of single values, one for each list of objects."""
    plain = {key: value for key, value in cluster.items() if not _is_rows(value)}
    if plain:
        table = Table("cluster", "", title_justify="left")
        for key, value in plain.items():
            table.add_row(key, _shown(value))
        yield table
    for key, rows in cluster.items():
        if _is_rows(rows):
            yield _rows(key, rows)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _rows(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
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
