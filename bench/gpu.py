"""What runs on a GPU: checked against the CPU, then measured against the ceilings of the same run.

    gpu_kernels.py   attention and its neighbours alone
    gpu_read.py      pages read from another process's pool
    gpu_engine.py    decode steps and prefill of an 8B Llama through the workers' loops

Each part gives a dict NAMES (row -> unit, better) and rows(quick). Where torch sees no GPU all rows are unsupported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from harness import Row, arguments, finish, identity

PARTS = ("gpu_kernels", "gpu_read", "gpu_engine")
BENCH = Path(__file__).resolve().parent


def parts() -> list[ModuleType]:
    """The parts that are there."""
    sys.path.insert(0, str(BENCH))
    try:
        return [importlib.import_module(name) for name in PARTS if (BENCH / f"{name}.py").exists()]
    finally:
        sys.path.remove(str(BENCH))


def why_not() -> str:
    """Why nothing can be measured here; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def rows_of(part: ModuleType, names: list[str], quick: bool, reason: str) -> list[Row]:
    """The wanted rows of one part; `reason`: why none can be measured."""
    wanted = [name for name in part.NAMES if name in names]
    if not wanted:
        return []
    if reason:
        what = identity(path="none")
        return [Row(n, None, *part.NAMES[n], status="unsupported", reason=reason, identity=what) for n in wanted]
    return [row for row in part.rows(quick) if row.name in wanted]


def main() -> None:
    known = parts()
    args = arguments((__doc__ or "").splitlines()[0], [name for part in known for name in part.NAMES])
    reason = why_not()
    finish([row for part in known for row in rows_of(part, args.names, args.quick, reason)], args)


if __name__ == "__main__":
    main()
