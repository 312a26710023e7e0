"""Pages from one process's pool into another's on this machine by the product's transports, in GB/s of page bytes.

    transfer.shm.<page>       64 MiB of pages in random order       against copy (one memory copy, one thread)
    transfer.nixl.<page>      the same over NIXL and UCX's tcp      against nixl_per_page, nixl_one_block, copy
    transfer.nixl.<page>.cpu  what both processes computed for it, ms, against the same: on two cores a move takes half
                              of it at least
    transfer.<kind>.handoff   1000 tokens of SmolLM2, ms            against copy
    transfer.control.*        bytes and seconds beside the pages    (transfer_control.py)
    transfer.overlap          a hand-off while its prompt is being computed, against larger      (transfer_overlap.py)
    transfer.decoding         a decoding gen while pages arrive, against alone                   (transfer_overlap.py)

Further rows come from the other modules named in PARTS, where they are present: each offers `NAMES` and
`rows(options: harness.Options) -> list[Row]`.

`--plot DIR` draws the rows by page size and transport (needs matplotlib). UCX_TLS is set to tcp unless it is set: what
two hosts without RDMA have; on one host UCX would otherwise choose shared memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from harness import MIN_PAIRS, Options, Row, arguments, finish, identity, interleaved, parser_of, row_of

os.environ.setdefault("UCX_TLS", "tcp")  # before NIXL is loaded, here and in the processes started here

from transfer_pair import CHUNKS, GRANTS, SMOLLM2_PAGE, TOTAL, Pair  # noqa: E402
from transfer_plots import by_page_size, plot  # noqa: E402

HANDOFF_PAGES = 63  # 1000 tokens
SIZES = {"4k": 4096, "16k": 16384, "64k": 65536, "1m": 1 << 20, "smollm2": SMOLLM2_PAGE}
NAMES = (
    "transfer.shm.4k", "transfer.shm.16k", "transfer.shm.64k", "transfer.shm.1m", "transfer.shm.smollm2",
    "transfer.shm.handoff",
    "transfer.nixl.4k", "transfer.nixl.16k", "transfer.nixl.64k", "transfer.nixl.1m", "transfer.nixl.smollm2",
    "transfer.nixl.handoff",
)  # fmt: skip
CPU_NAMES = tuple(
    f"{name}.cpu" for name in NAMES if name.startswith("transfer.nixl.") and not name.endswith(".handoff")
)
PARTS = ("transfer_control", "transfer_overlap", "transfer_codecs", "transfer_peers", "transfer_verify")


def measure(kind: str, size: str, pairs: int) -> list[Row]:
    """A row, and over nixl that of the CPU time beside it."""
    name = f"transfer.{kind}.{size}"
    handoff = size == "handoff"
    page_bytes = SMOLLM2_PAGE if handoff else SIZES[size]
    pair = Pair(kind, page_bytes, HANDOFF_PAGES if handoff else TOTAL // page_bytes)
    try:
        what = identity(transport=kind, page_bytes=page_bytes, pages=pair.n)
        if kind == "nixl":
            what |= {"UCX_TLS": os.environ["UCX_TLS"], "chunk_bytes": CHUNKS.chunk_bytes, "grants": GRANTS}
        pair.move()
        nbytes = pair.n * page_bytes
        unit, better = ("ms", "lower") if handoff else ("GB/s", "higher")
        if not pair.is_right():
            return [Row(name, None, unit, better, status="held", reason="bytes differ; when they agree", identity=what)]
        cpu_ms: dict[str, list[float]] = {}

        def rate(key: str, seconds: Callable[[], float]) -> Callable[[], float]:
            def measured() -> float:
                before = pair.cpu_s()
                took = seconds()
                cpu_ms.setdefault(key, []).append((pair.cpu_s() - before) * 1e3)
                return took * 1e3 if handoff else nbytes / took / 1e9

            return measured

        measures = {"ours": rate("ours", pair.move)}
        if kind == "nixl":
            measures |= {"nixl_one_block": rate("nixl_one_block", pair.one_block)}
            if not handoff:
                measures |= {"nixl_per_page": rate("nixl_per_page", pair.per_page)}
        measures["copy"] = rate("copy", pair.copy)
        samples = interleaved(measures, pairs, warm_ups=2)
        if not pair.is_right():
            return [Row(name, None, unit, better, status="held", reason="bytes differ; when they agree", identity=what)]
        rows = [row_of(name, unit, better, samples, what)]
        if f"{name}.cpu" in CPU_NAMES:
            computed = {key: values[-pairs:] for key, values in cpu_ms.items() if key != "copy"}
            rows.append(row_of(f"{name}.cpu", "ms", "lower", computed, what))
        return rows
    finally:
        pair.close()


def parts() -> list[ModuleType]:
    """The modules of PARTS that are here."""
    return [importlib.import_module(name) for name in PARTS if importlib.util.find_spec(name) is not None]


def main() -> None:
    others = parts()
    parser = parser_of(__doc__ or "")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots there (needs matplotlib)")
    args = arguments("", (*NAMES, *CPU_NAMES, *(name for part in others for name in part.NAMES)), parser=parser)
    options = Options(args.quick, MIN_PAIRS if args.quick else 3 * MIN_PAIRS, tuple(args.names))
    rows = []
    for name in NAMES:
        if options.wants(name) or options.wants(f"{name}.cpu"):
            _, kind, size = name.split(".")
            rows += [row for row in measure(kind, size, options.pairs) if options.wants(row.name)]
    for part in others:
        if any(options.wants(name) for name in part.NAMES):
            rows += part.rows(options)
    finish(rows, args)
    print(by_page_size(rows, SIZES))
    if args.plot is not None:
        plot(rows, SIZES, args.plot)


if __name__ == "__main__":
    main()
