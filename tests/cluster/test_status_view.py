"""`tailrace status`: what an operator reads on a narrow terminal."""

import io

from rich.console import Console

from tailrace.cluster.status_view import render

LOAD = {"prefill_tokens": 0, "seconds": 0.0, "pages": 0, "seats": 0, "unknown_requests": 0}


def worker(name: str, load: dict) -> dict:
    return {
        "name": name, "boot": "6e1b85e36885f36d", "duty": "gen", "address": "192.168.10.20:45857", "condition": "ready",
        "phase": "run", "running": 2, "queued": 0, "pages": {"total": 2911, "free": 2900, "used": 11},
        "load": LOAD | load,
    }  # fmt: skip


def test_a_workers_pages_and_load_can_be_read_on_a_terminal_of_120_columns():
    pool = {
        "pages": {"total": 5822, "free": 5811, "used": 11},
        "workers": [worker("gen-0", {"seats": 2}), worker("gen-1", {})],
    }
    shown = io.StringIO()
    for part in render({"queue": {"length": 0}, "pools": {"gen": pool}, "pairs": []}):
        Console(file=shown, width=120).print(part)
    lines = [line for line in shown.getvalue().splitlines() if "gen-" in line]
    assert len(lines) == 2
    assert "11 of 2911" in lines[0] and "seats 2" in lines[0] and "192.168.10.20:45857" in lines[0]
    assert " - " in lines[1] and "6e1b85e36885f36d" in lines[1]
