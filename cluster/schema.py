"""Writes what is generated from the configuration: its JSON Schema and its page of documentation.

`python -m tailrace.cluster.schema` (make schema) writes both into the checkout; a test compares them with what stands
there, so neither is edited by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tailrace.cluster.config import TailraceConfig, Tenant

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_FILE = ROOT / "manifests" / "config.schema.json"
DOCS_FILE = ROOT / "docs" / "configuration.md"

HEAD = """# Configuration

Generated from `cluster/config.py` by `make schema`; do not edit. The keys stand under `applications[0].args` of a Serve
YAML (`manifests/serve/full.yaml` shows every one). Unknown keys are refused at every level. `prototype` keys exist so
that files stay valid, but values that need a later release are refused with the reason. Sizes are bytes or `512MiB`,
`1GiB`; durations are seconds. `tailrace check FILE` validates a file and prints what follows from it.
"""


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the whole configuration."""
    schema = TailraceConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def docs_text() -> str:
    """One table a level: key, default, status, meaning."""
    parts = [HEAD, *_table(TailraceConfig, "Top level")]
    for name, field in TailraceConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts += _table(kind, f"`{name}`: {field.description}")

    parts += _table(Tenant, "`tenants.NAME`: one tenant")
    return "\n".join(parts).rstrip("\n") + "\n"


def _table(kind: type[BaseModel], title: str) -> list[str]:
    lines = [f"## {title}", "", "| key | default | status | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = "section" if field.default is PydanticUndefined else _shown(field.default)
        lines.append(f"| `{name}` | {default} | {extra['x-status']} | {field.description} |")
    return [*lines, ""]


def _shown(default: object) -> str:
    if default is None:
        return "unset"
    return f"`{json.dumps(default)}`"


def main() -> None:
    SCHEMA_FILE.write_text(schema_text())
    DOCS_FILE.parent.mkdir(exist_ok=True)
    DOCS_FILE.write_text(docs_text())


if __name__ == "__main__":
    main()
