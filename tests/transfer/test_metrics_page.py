"""The list of metrics in docs/operations.md is the one that the code declares."""

import re
from pathlib import Path

from tailrace.transfer.metrics import METRICS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
ROW = re.compile(r"\| `(tailrace_\w+)` \| (\w+) \| (.*?) \| (.*?) \|")


def test_the_page_lists_every_metric_with_its_kind_labels_and_help():
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows()}
    assert listed == {name: (spec.kind, spec.labels, spec.help) for name, spec in METRICS.items()}
    assert [name for name, *_ in rows()] == list(METRICS)


def test_names_in_the_text_are_metrics():
    assert set(re.findall(r"tailrace_[a-z_]+", PAGE.read_text())) <= set(METRICS)


def rows() -> list[tuple[str, str, str, str]]:
    return ROW.findall(PAGE.read_text())
