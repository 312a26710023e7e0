"""Memory of the application as `make serve` starts it: PSS of our four roles, supervisors included, Ray's own apart.

    cpu.memory.pss     bytes, after every page of both pools has been touched; target under 4 GiB with 2 GiB of pages

Runs `tailrace serve manifests/serve/local.yaml` on free ports, asks a few questions, and reads /proc.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
from harness import ROOT, Row, arguments, finish, identity

from tailrace.cluster.launcher import free_ports

NAMES = ("cpu.memory.pss",)
LIMIT_BYTES = 4 * 2**30
ROLES = {"Router": "router", "Ingress": "ingress", "CtxPool": "ctx", "GenPool": "gen"}


def role_of(process: psutil.Process) -> str | None:
    """Our role that this process belongs to; None for Ray's own."""
    words = " ".join(process.cmdline())
    if "tailrace.cluster.rank" in words:
        parent = process.parent()
        return None if parent is None else role_of(parent)
    return next((role for name, role in ROLES.items() if "ServeReplica" in words and name in words), None)


def measure() -> dict[str, float]:
    """PSS in bytes by role."""
    port, operators = free_ports(2)
    command = [sys.executable, "-m", "tailrace.cluster.cli", "serve", str(ROOT / "manifests/serve/local.yaml")]
    options = ["--port", str(port), "--operators-port", str(operators)]
    with tempfile.TemporaryFile("w+") as log:
        served = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
        assert served.stdout is not None
        try:
            for line in served.stdout:
                if line.startswith("serving"):
                    break
            for number in range(8):
                body = {"prompt": f"Number {number}: " + "the river " * 400, "max_tokens": 32}
                httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120).raise_for_status()
            total: dict[str, float] = {}
            for process in psutil.Process(served.pid).children(recursive=True):
                role = role_of(process)
                if role is not None:
                    total[role] = total.get(role, 0) + process.memory_full_info().pss
            return total
        finally:
            served.send_signal(signal.SIGINT)
            served.wait(60)


def main() -> None:
    args = arguments(__doc__ or "", NAMES)
    by_role = measure()
    what = identity(model="smollm2", manifest=Path("manifests/serve/local.yaml").name)
    rows = [Row(f"cpu.memory.pss.{role}", value, "bytes", "lower", identity=what) for role, value in by_role.items()]
    total = sum(by_role.values())
    rows.insert(0, Row(NAMES[0], total, "bytes", "lower", {"limit": total / LIMIT_BYTES}, identity=what))
    finish(rows, args)


if __name__ == "__main__":
    main()
