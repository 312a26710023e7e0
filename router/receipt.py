"""The receipt of a request, for clients that ask how it was served: `X-Tailrace-Receipt`.

A JSON array with one entry a prompt, the first eight of a batch. A whole answer carries it as a header; a stream, whose
headers are gone before most of it is known, as a comment before its last event, which clients of SSE pass over. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tailrace.router.flow import Flow, Stamps

HEADER = b"x-tailrace-receipt"
MAX_ENTRIES = 8  # a header has to fit into what proxies allow


def ttft_parts(stamps: Stamps, arrived: float) -> dict[str, float]:
    """Seconds from `arrived` to the first token, whole and by part; `wire` is what the other parts leave.

    The parts are told of a first attempt only: a later one begins in the middle of them.
    """
    if stamps.first_token is None:
        return {}
    whole = stamps.first_token - arrived
    if stamps.placed is None:
        return {"whole": whole}
    worker = stamps.worker or {}
    parts = {
        "tokenize": stamps.began - arrived, "place": stamps.placed - stamps.began, "queue": worker.get("queue", 0.0),
        "prefill": worker.get("prefill", 0.0),
    }  # fmt: skip
    if "replay" in worker:  # the first token came from gen, so the transfer is in `wire`
        parts["replay"] = worker["replay"]
    return {"whole": whole, **parts, "wire": max(0.0, whole - sum(parts.values()))}


def receipt(flows: Sequence[Flow], arrived: float) -> str:
    """The receipt as ASCII JSON on one line."""
    entries = [_entry(flow, arrived) for flow in flows[:MAX_ENTRIES]]
    return json.dumps(entries, separators=(",", ":"))


def comment(flows: Sequence[Flow], arrived: float) -> str:
    """The receipt as an SSE comment."""
    return f": {HEADER.decode()} {receipt(flows, arrived)}\n\n"


def _entry(flow: Flow, arrived: float) -> dict[str, Any]:
    ctx, gen = flow.workers
    moved = flow.moved
    parts = ttft_parts(flow.stamps, arrived)
    if flow.attempt > 1:
        parts = {name: seconds for name, seconds in parts.items() if name == "whole"}
    return {
        "ctx": ctx,
        "gen": gen,
        "attempt": flow.attempt,
        "cached_tokens": flow.cached_tokens,
        "transport": moved and moved.transport,
        "codec": moved and (moved.codec or None),
        "logical_bytes": moved.logical_bytes if moved else 0,
        "wire_bytes": moved.wire_bytes if moved else 0,
        "pages": moved.pages if moved else 0,
        "pages_skipped": moved.pages_skipped if moved else 0,
        "checksum": "verified" if moved and moved.verified else None,
        "replay": moved and (moved.step or None),
        "hand_off_s": moved and round(moved.seconds, 6),
        "ttft_s": {name: round(seconds, 6) for name, seconds in parts.items()},
    }
