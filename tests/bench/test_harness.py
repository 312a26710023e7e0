"""The benches' shared part: rows, interleaving, ratios, files and the comparison of two of them."""

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench():
    """bench(name) -> a module of bench/, which is a folder of scripts and no package."""
    before = dict(sys.modules)
    sys.path.insert(0, str(BENCH))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path.remove(str(BENCH))
    for name in set(sys.modules) - set(before):
        if name in ("harness", "compare"):
            del sys.modules[name]


def test_measurements_alternate_and_the_warm_up_is_thrown_away(bench):
    harness = bench("harness")
    order: list[str] = []
    count = iter(range(100))
    measures = {name: lambda name=name: order.append(name) or float(next(count)) for name in ("ours", "theirs")}
    samples = harness.interleaved(measures, 7)
    assert order[:6] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [len(values) for values in samples.values()] == [7, 7]
    assert samples["theirs"][0] == 2.0 and samples["ours"][0] == 3.0


def test_fewer_than_seven_pairs_are_refused(bench):
    with pytest.raises(ValueError, match="6 pairs"):
        bench("harness").interleaved({"ours": lambda: 1.0}, 6)


def test_a_row_holds_the_median_of_the_pairs_ratios_not_the_ratio_of_medians(bench):
    harness = bench("harness")
    row = harness.row_of("r", "ms", "lower", {"ours": [1, 10, 100], "peer": [2, 10, 50]}, {"a": 1})
    assert row.value == 10 and row.against == {"peer": 1.0}
    row = harness.row_of("r", "ms", "lower", {"ours": [3, 1, 2], "peer": [1, 2, 4]}, {})
    assert row.against == {"peer": 0.5}
    assert row.samples == {"ours": [3, 1, 2], "peer": [1, 2, 4]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"better": "faster"},
        {"status": "fine"},
        {"status": "held"},
        {"reason": "because"},
        {"value": None},
    ],
)
def test_a_row_that_contradicts_itself_is_refused(bench, wrong):
    with pytest.raises(ValueError, match="row r"):
        bench("harness").Row(**({"name": "r", "value": 1.0, "unit": "ms", "better": "lower"} | wrong))


def test_rows_survive_their_file_and_stand_in_the_table(bench, tmp_path, capsys):
    harness = bench("harness")
    rows = [
        harness.Row("a.b", 12.5, "tokens/s", "higher", {"peer": 2.0}, identity=harness.identity(policy="p")),
        harness.Row("a.c", None, "ms", "lower", status="held", reason="gate failed; lifted when it passes"),
    ]
    harness.finish(rows, Namespace(json=tmp_path / "rows.json"))
    out = capsys.readouterr().out
    assert "a.b" in out and "peer 2.00" in out and "held: gate failed" in out
    assert list(harness.read_rows(tmp_path / "rows.json").values()) == rows
    assert {"name", "value", "unit", "better", "against", "status", "reason", "identity"} <= set(
        json.loads((tmp_path / "rows.json").read_text())[0]
    )


def test_the_comparison_calls_worse_what_got_worse(bench):
    harness, compare = bench("harness"), bench("compare")

    def rows(**values: tuple[float | None, str]) -> dict:
        return {
            name: harness.Row(name, value, "u", better)
            if value is not None
            else harness.Row(name, None, "u", better, status="held", reason="why")
            for name, (value, better) in values.items()
        }

    old = rows(rate=(100, "higher"), time=(100, "lower"), same=(10, "higher"), gone=(1, "higher"), gate=(1, "higher"))
    new = rows(rate=(80, "higher"), time=(80, "lower"), same=(9.5, "higher"), gate=(None, "higher"), fresh=(3, "lower"))
    lines, worse = compare.compare(old, new, 0.1)
    flagged = {line.split()[1] for line in lines if line.startswith("WORSE")}
    assert flagged == {"rate", "gone", "gate"} and worse == 3 and len(lines) == 6
    assert compare.compare(rows(time=(100, "lower")), rows(time=(130, "lower")), 0.1)[1] == 1
    assert compare.compare(old, old, 0.1)[1] == 0


def test_a_bench_finds_the_tests_cluster_and_what_that_needs_from_its_own_folder_alone(bench, monkeypatch):
    """It runs as a script: the tests' folder, which pytest has on its path, is not on its own."""
    cpu_http = bench("cpu_http")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != BENCH.parent / "tests"])
    for name in ("forked_process", "cluster_harness"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert cpu_http.load_cluster_class().__name__ == "LocalCluster"
    assert sys.path.index(str(BENCH)) < sys.path.index(str(BENCH.parent / "tests")), "our own harness comes first"
