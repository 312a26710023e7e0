"""What every bench shares: rows, interleaved measuring, the command line, one table and one JSON file.

A row is one number with what it was held against in the same run. Peers are measured in turns with us, so that a
change of the machine's mood hits both, and the median of the pairs' ratios is quoted. A figure that cannot be had here,
or that failed its correctness gate, stays in the table with its status and reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MIN_PAIRS = 7
STATUSES = ("ok", "invalid", "unsupported", "held")
ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Row:
    """One figure.

    Attributes:
        name: stable; a further figure of the same thing has a suffix.
        better: higher | lower.
        against: peer or limit -> our value / its value, median over the pairs.
        status: ok | invalid | unsupported | held; all but ok give a reason, held also what would lift it.
        identity: what was measured, on what; see `identity`.
        samples: raw values, ours under "ours", each peer's under its key.
    """

    name: str
    value: float | None
    unit: str
    better: str
    against: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    identity: dict[str, object] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower") or self.status not in STATUSES:
            raise ValueError(f"row {self.name}: better {self.better!r}, status {self.status!r}")
        if (self.status == "ok") != (not self.reason) or (self.status == "ok" and self.value is None):
            raise ValueError(f"row {self.name}: status {self.status!r} with value {self.value}, reason {self.reason!r}")


@dataclass(frozen=True, slots=True)
class Options:
    """What a part of a bench is asked for. A part is a module with `NAMES` and `rows(options) -> list[Row]`.

    Attributes:
        pairs: interleaved turns of each measurement, at least MIN_PAIRS.
        names: of the rows that are wanted; a part gives those of its own NAMES that are among them.
    """

    quick: bool
    pairs: int
    names: tuple[str, ...]

    def wants(self, name: str) -> bool:
        return name in self.names


def parser_of(description: str) -> argparse.ArgumentParser:
    """What every bench takes: --quick, --json FILE, --only NAME."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", action="append", metavar="NAME", help="rows whose name begins so; may be repeated")
    return parser


def arguments(
    description: str,
    names: Sequence[str],
    *,
    trace: str | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> argparse.Namespace:
    """The command line of every bench, --trace FILE where it replays one, and what `parser` has beside; `names`."""
    parser = parser or parser_of(description)
    if trace is not None:
        default = ROOT.parent / "shared" / "traces" / trace
        parser.add_argument("--trace", type=Path, default=default, metavar="FILE")
    args = parser.parse_args()
    args.names = [n for n in names if not args.only or any(n.startswith(o) for o in args.only)]
    return args


def interleaved(
    measures: Mapping[str, Callable[[], float]], pairs: int, *, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Measure all in turns, in alternating order; the first `warm_ups` turns are thrown away."""
    if pairs < MIN_PAIRS:
        raise ValueError(f"{pairs} pairs are too few, at least {MIN_PAIRS}")
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(warm_ups + pairs):
        order = list(measures) if turn % 2 == 0 else list(measures)[::-1]
        for name in order:
            value = measures[name]()
            if turn >= warm_ups:
                samples[name].append(value)
    return samples


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the pairs of our value / its value."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def row_of(
    name: str,
    unit: str,
    better: str,
    samples: Mapping[str, Sequence[float]],
    what: Mapping[str, object],
    *,
    ours: str = "ours",
) -> Row:
    """A row from interleaved samples, `ours` held against every other key."""
    mine = list(samples[ours])
    against = {key: ratio(mine, theirs) for key, theirs in samples.items() if key != ours}
    raw = {"ours" if key == ours else key: list(values) for key, values in samples.items()}
    return Row(name, statistics.median(mine), unit, better, against, identity=dict(what), samples=raw)


def identity(**what: object) -> dict[str, object]:
    """Commit, version and machine, beside what the bench says of itself (policy, path, shapes, ...)."""
    return {
        "commit": _commit(),
        "version": _version("tailrace"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "card": "none",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": _version("torch"),
    } | what


def finish(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Print the table and, if asked, write the JSON."""
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read_rows(path: Path) -> dict[str, Row]:
    """Rows of a JSON file by name."""
    return {row["name"]: Row(**row) for row in json.loads(path.read_text())}


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    lines = [("row", "value", "unit", "against (ours / theirs)", "status")]
    for row in rows:
        value = "-" if row.value is None else f"{row.value:,.4g}" if row.value < 1000 else f"{row.value:,.0f}"
        against = ", ".join(f"{key} {factor:.2f}" for key, factor in row.against.items())
        status = row.status if not row.reason else f"{row.status}: {row.reason}"
        lines.append((row.name, value, row.unit, against, status))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        f"{n:<{widths[0]}}  {v:>{widths[1]}} {u:<{widths[2]}}  {a:<{widths[3]}}  {s}".rstrip()
        for n, v, u, a, s in lines
    )


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
