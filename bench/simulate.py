"""The product's own router on a simulated clock, from 1 to 1,024 workers a pool, on a trace.

    simulate.hit.w16                cached share of the prompt tokens, `prefix`, at the load nearest its goodput;
                                    against round_robin at that load and infinite_cache
    simulate.hit.w16.goodput        requests/s and worker of `prefix` against round_robin
    simulate.goodput.w{1,16,128,1024}   the same at each size, against aggregated too
    simulate.imbalance.w{16,128,1024}   busiest ctx's computed prompt tokens over the mean, at that load
    simulate.decision_p99.w1024     milliseconds of CPU from a request to its ctx among 1,024 ctx and 1,024 gen, without
                                    the claims; .p50; .place: of the router's whole handling of a Place
    simulate.split.w16.gapN         goodput of the best split of 32 workers at gaps of at most N ms, against aggregated
    simulate.crossing.w16           gap limit in ms from which on aggregated serving has the higher goodput
    simulate.validate.md1           mean wait of one ctx under random arrivals over what queueing theory says

What is simulated and what not: docs/simulation.md. Instead of all this, `--live FILE` compares with what
bench/routing.py measured (simulate_live.py), `--decisions FILE` asks the other policies about the decisions in a
router's log (simulate_decisions.py).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness import Row, arguments, finish, identity, parser_of
from simulate_checks import md1_ratio
from simulate_figures import (
    Limits,
    Point,
    best,
    crossing,
    goodput,
    infinite,
    near,
    point,
    quantile,
    reaches_end,
    sweep,
    table,
)  # fmt: skip
from simulate_live import live_rows
from simulate_plots import over_gap_limit, over_load
from simulate_times import PROFILES
from simulate_trace import BASE_WORKERS, Request, read
from simulate_world import Setup

SIZES = (1, 16, 128, 1024)
SPLIT_GAPS_MS = (20, 30, 50, 100, 200)
NAMES = (
    "simulate.hit.w16", "simulate.hit.w16.goodput",
    "simulate.goodput.w1", "simulate.goodput.w16", "simulate.goodput.w128", "simulate.goodput.w1024",
    "simulate.imbalance.w16", "simulate.imbalance.w128", "simulate.imbalance.w1024",
    "simulate.decision_p99.w1024", "simulate.decision_p99.w1024.p50", "simulate.decision_p99.w1024.place",
    "simulate.split.w16.gap20", "simulate.split.w16.gap30", "simulate.split.w16.gap50", "simulate.split.w16.gap100",
    "simulate.split.w16.gap200", "simulate.crossing.w16",
    "simulate.validate.md1",
)  # fmt: skip
SPEEDS = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 17.0, 20.0, 24.0)
# Where the conversation trace stops being good, by h200 times: a large cluster is looked at only around it.
DECISION_REPLAYS = 5
LARGE_SPEEDS = (4.0, 5.0, 6.0, 7.0, 8.0)
Sweeps = dict[str, list[Point]]


class Study:
    """The sweeps that the rows share, each made once."""

    def __init__(self, args: Namespace, requests: Sequence[Request]) -> None:
        self.args, self.requests = args, requests
        self.limits = Limits(args.ttft, args.gap / 1000)
        self.setup = Setup(
            PROFILES[args.times], budget=args.budget, device_blocks=args.device_blocks, host_blocks=args.host_blocks,
            gen_blocks=args.gen_blocks,
        )  # fmt: skip
        self._made: dict[tuple[str, int], list[Point]] = {}

    def rows_of(self, workers: int) -> Sequence[Request]:
        """The trace, or its beginning where so many copies of it would be too much."""
        copies = max(1, workers // BASE_WORKERS)
        return self.requests[: max(1, self.args.requests // copies)]

    def speeds(self, workers: int) -> Sequence[float]:
        if self.args.speeds:
            return self.args.speeds
        if workers <= BASE_WORKERS:
            return SPEEDS[1::2] if self.args.quick else SPEEDS
        return LARGE_SPEEDS[::2] if self.args.quick else LARGE_SPEEDS

    def setups(self, workers: int) -> dict[str, Setup]:
        """Every way to use 2 x `workers` workers that some row speaks of."""
        split = replace(self.setup, ctx=workers, gen=workers)
        found = {name: replace(split, placement=name) for name in ("prefix", "least_prefill", "round_robin")}
        if workers >= 4:
            quarter = workers // 2
            for gen in (quarter, quarter + quarter // 2):
                found[f"prefix {2 * workers - gen}+{gen}"] = replace(
                    split, ctx=2 * workers - gen, gen=gen, placement="prefix"
                )
        for budget in (256, 512, 2048):
            found[f"aggregated {budget}"] = replace(
                self.setup, both=2 * workers, placement="prefix", budget=budget, device_blocks=self.args.gen_blocks
            )
        return found

    def sweep(self, label: str, workers: int) -> list[Point]:
        key = (label, workers)
        if key not in self._made:
            print(f"{label}, {workers} workers a pool ...", file=sys.stderr, flush=True)
            setup, requests = self.setups(workers)[label], self.rows_of(workers)
            self._made[key] = sweep(setup, requests, workers, self.speeds(workers), self.limits)
        return self._made[key]

    def splits(self, workers: int) -> Sweeps:
        return {k: self.sweep(k, workers) for k in self.setups(workers) if k.startswith("prefix")}

    def aggregated(self, workers: int) -> Sweeps:
        return {k: self.sweep(k, workers) for k in self.setups(workers) if k.startswith("aggregated")}

    def made(self, workers: int) -> Sweeps:
        """What was swept at that size."""
        return {label: points for (label, at), points in self._made.items() if at == workers}

    def what(self, workers: int) -> dict[str, object]:
        args = self.args
        copies = max(1, workers // BASE_WORKERS)
        rows = len(self.rows_of(workers))
        how = f"{copies} copies" if workers >= BASE_WORKERS else f"{BASE_WORKERS // workers} parts by session"
        return identity(
            policy="prefix", path="RouterCore on a simulated clock",
            times=self.setup.times.source, trace=args.trace.name,
            shapes=f"{workers} ctx + {workers} gen; {how} of {rows} rows, arrivals spread over 3 s with seed 1",
            sample="whole" if rows == len(self.requests) else f"the first {rows} of {len(self.requests)} rows",
            limits=f"TTFT {args.ttft} s, gaps {args.gap} ms (1 in 100 may be longer), 90 % of the offered requests",
            caches=f"{args.device_blocks} blocks of 512 on the device, {args.host_blocks} on the host; gen "
            f"{args.gen_blocks}",
            budget=args.budget, speeds=list(self.speeds(workers)),
        )  # fmt: skip


def hit_rows(study: Study) -> list[Row]:
    ours, other = study.sweep("prefix", 16), study.sweep("round_robin", 16)
    mine, theirs = goodput(ours, study.limits), goodput(other, study.limits)
    at = near(ours, mine)
    beside = next((p for p in other if p.speed == at.speed), other[-1])
    most = infinite(study.rows_of(16), 16, at.speed)
    what = study.what(16) | {"load": f"speed {at.speed:g}, {at.offered:.3g} requests/s and worker"}
    factor = {"round_robin": mine / theirs} if theirs else {}
    return [
        Row(
            "simulate.hit.w16", at.hit, "share", "higher",
            {"round_robin": at.hit / max(beside.hit, 1e-9), "infinite_cache": at.hit / max(most, 1e-9)}, identity=what,
        ),
        Row("simulate.hit.w16.goodput", mine, "1/s", "higher", factor, identity=what),
    ]  # fmt: skip


def goodput_row(study: Study, workers: int) -> Row:
    ours = study.sweep("prefix", workers)
    mine = goodput(ours, study.limits)
    against = {"round_robin": goodput(study.sweep("round_robin", workers), study.limits)}
    what = study.what(workers)
    if workers <= 128 and not (study.args.quick and workers > 16):
        label, value = best(study.aggregated(workers), study.limits)
        against["aggregated"] = value
        what["aggregated"] = f"{2 * workers} workers of duty both, the best of three budgets: {label}"
    what["rejected"] = {f"{p.offered:.3g}": round(p.refused, 4) for p in ours}
    if reaches_end(ours, study.limits):
        what["note"] = "the highest load of the sweep was still good"
    return Row(
        f"simulate.goodput.w{workers}", mine, "1/s", "higher", {k: mine / v for k, v in against.items() if v},
        identity=what,
    )  # fmt: skip


def imbalance_row(study: Study, workers: int) -> Row:
    ours, other = study.sweep("prefix", workers), study.sweep("round_robin", workers)
    at = near(ours, goodput(ours, study.limits))
    beside = next((p for p in other if p.speed == at.speed), other[-1])
    return Row(
        f"simulate.imbalance.w{workers}", at.imbalance, "ratio", "lower",
        {"round_robin": at.imbalance / beside.imbalance},
        identity=study.what(workers) | {"load": f"speed {at.speed:g}"},
    )  # fmt: skip


def decision_rows(study: Study) -> list[Row]:
    """Times of CPU, each the least of some replays, which decide alike: then what else the machine does is left out."""
    speed = study.args.speeds[0] if study.args.speeds else LARGE_SPEEDS[len(LARGE_SPEEDS) // 2]
    setup, requests = study.setups(1024)["prefix"], study.rows_of(1024)
    points = [point(setup, requests, 1024, speed) for _ in range(DECISION_REPLAYS)]
    if len({tuple(o.worker for o in p.outcomes) for p in points}) != 1:
        raise RuntimeError("replays of one trace have decided differently")
    choices = [min(each) for each in zip(*(p.choose_s for p in points), strict=True)]
    places = [min(each) for each in zip(*(p.place_s for p in points), strict=True)]
    what = study.what(1024) | {
        "decisions": len(choices), "speeds": [speed],
        "timed": f"CPU of one thread, the least of {DECISION_REPLAYS} equal replays: from a request to its ctx (who is "
        "there, pages and rows of the pool, block index, shortlist, room, policy), without the claims that follow; "
        ".place: the router's whole handling of a Place frame",
    }  # fmt: skip
    name = "simulate.decision_p99.w1024"
    return [
        Row(name, 1000 * quantile(choices, 0.99), "ms", "lower", identity=what),
        Row(f"{name}.p50", 1000 * quantile(choices, 0.5), "ms", "lower", identity=what),
        Row(f"{name}.place", 1000 * quantile(places, 0.99), "ms", "lower", identity=what),
    ]


def crossing_rows(study: Study, names: Sequence[str]) -> list[Row]:
    ours, theirs = study.splits(16), study.aggregated(16)
    what = study.what(16)
    rows = []
    for ms in SPLIT_GAPS_MS:
        limits = replace(study.limits, gap_s=ms / 1000)
        (label, mine), (other, value) = best(ours, limits), best(theirs, limits)
        rows.append(
            Row(
                f"simulate.split.w16.gap{ms}",
                mine,
                "1/s",
                "higher",
                {"aggregated": mine / value} if value else {},
                identity=what | {"ours": label, "theirs": other if value else "no load is good"},
            )  # fmt: skip
        )
    found = crossing(ours, theirs, study.limits)
    name = "simulate.crossing.w16"
    if found is None:
        reason = "at no gap limit up to 500 ms has aggregated serving the higher goodput"
        rows.append(Row(name, None, "ms", "higher", status="unsupported", reason=reason, identity=what))
    else:
        rows.append(Row(name, 1000 * found, "ms", "higher", identity=what))
    return [row for row in rows if row.name in names]


def all_rows(args: Namespace, study: Study) -> list[Row]:
    rows: list[Row] = []
    wants = lambda start: any(name.startswith(start) for name in args.names)  # noqa: E731
    if wants("simulate.hit"):
        rows += [row for row in hit_rows(study) if row.name in args.names]
    rows += [goodput_row(study, n) for n in SIZES if f"simulate.goodput.w{n}" in args.names]
    rows += [imbalance_row(study, n) for n in SIZES if f"simulate.imbalance.w{n}" in args.names]
    if wants("simulate.decision"):
        rows += [row for row in decision_rows(study) if row.name in args.names]
    if wants("simulate.split") or wants("simulate.crossing"):
        rows += crossing_rows(study, args.names)
    if "simulate.validate.md1" in args.names:
        what = identity(path="RouterCore on a simulated clock", times=PROFILES["flat"].source, policy="least_prefill")
        rows.append(Row("simulate.validate.md1", md1_ratio(), "ratio", "lower", identity=what))
    return rows


def absent(args: Namespace) -> list[Row]:
    reason = f"no trace at {args.trace.name}"
    what = identity(trace=args.trace.name)
    return [Row(name, None, "", "lower", status="unsupported", reason=reason, identity=what) for name in args.names]


def main() -> None:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--times", choices=sorted(PROFILES), default="h200", help="service times of a worker")
    parser.add_argument("--ttft", type=float, default=5.0, metavar="S", help="limit of the time to the first token")
    parser.add_argument("--gap", type=float, default=50.0, metavar="MS", help="limit between tokens")
    parser.add_argument("--budget", type=int, default=8192, help="prompt tokens of one pass of a ctx")
    parser.add_argument("--device-blocks", type=int, default=1000)
    parser.add_argument("--host-blocks", type=int, default=3000)
    parser.add_argument("--gen-blocks", type=int, default=1000)
    parser.add_argument("--requests", type=int, metavar="N", help="at most so many requests in one replay")
    parser.add_argument("--speeds", type=lambda text: [float(x) for x in text.split(",")], metavar="X,Y", default=())
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the sweeps there")
    parser.add_argument("--live", type=Path, metavar="FILE", help="what bench/routing.py --json wrote, to compare with")
    parser.add_argument("--decisions", type=Path, metavar="FILE", help="replay a router's decision log instead")
    args = arguments("", NAMES, trace="mooncake_conversation_first2000_sessions.jsonl", parser=parser)
    args.requests = args.requests or (4000 if args.quick else 24000)
    if args.decisions is not None:
        from simulate_decisions import decision_rows as logged

        finish(logged(args.decisions), args)
        return
    if not args.trace.exists():
        finish(absent(args), args)
        return
    requests = read(args.trace)
    if args.live is not None:
        what = identity(path="RouterCore on a simulated clock", policy="prefix", times=PROFILES["flat"].source)
        finish(live_rows(requests, args.live, "prefix", what), args)
        return
    study = Study(args, requests[:800] if args.quick else requests)
    rows = all_rows(args, study)
    for workers in SIZES:
        if made := study.made(workers):
            print(table(f"{workers} workers a pool", made, study.limits))
            if args.plots is not None:
                args.plots.mkdir(parents=True, exist_ok=True)
                over_load(f"w{workers}", made, study.limits, args.plots)
                over_gap_limit(f"w{workers}", made, study.limits, args.plots)
    print()
    finish(rows, args)


if __name__ == "__main__":
    main()
