"""Traces for the simulator and for bench/routing.py: read, spread, scaled to any number of workers.

A trace's hash id names a block of 512 tokens and all before it. Only full blocks can be reused, so ids beyond the last
full one are dropped. Rows without ids share nothing.

Scaling keeps what one worker sees: a sample that is right for BASE_WORKERS workers a pool is replayed
    with more workers    by so many copies side by side, each copy's blocks renamed so that copies share nothing but the
                         first block of the conversation trace (a system prompt that all have), each shifted a little
    with fewer workers   in so many parts, each with every n-th session, one after the other, each on empty workers; the
                         outcomes are pooled
so the load, the sessions and the blocks between two turns of a session stay the same a worker. The load itself is set
by the speed: all arrivals are divided by it, which also shortens the pauses between turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK = 512
BASE_WORKERS = 16
SPREAD_S = 3.0  # the conversation trace's time stamps are rounded to this
SHIFT_S = 30.0  # copies begin within so much of each other, at speed 1


@dataclass(frozen=True, slots=True)
class Request:
    """One row.

    Attributes:
        at: seconds from the start; if `after` is set, from the end of that row's answer.
        blocks: hash ids of the full blocks.
        after: index of the row that must have ended, or -1.
    """

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]
    session: str
    after: int = -1


def read(path: Path, *, seed: int = 1) -> list[Request]:
    """Rows of a trace in order of arrival.

    Raises:
        FileNotFoundError: there is no such file.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if rows and "delay_ms" in rows[0]:
        return _closed_loop(rows)
    draw = random.Random(seed)
    quantised = "hash_ids" in rows[0] and 2 * len({row["timestamp"] for row in rows}) < len(rows)
    found = [
        Request(
            row["timestamp"] / 1000 + (draw.uniform(0, SPREAD_S) if quantised else 0.0),
            row["input_length"],
            max(1, row["output_length"]),
            tuple(row.get("hash_ids", ())[: row["input_length"] // BLOCK]),
            str(row.get("session", i)),
        )
        for i, row in enumerate(rows)
    ]
    return sorted(found, key=lambda request: request.at)


def _closed_loop(rows: list[dict]) -> list[Request]:
    """Turns wait for the answer before them; a sub-agent begins after its parent's first answer."""
    last: dict[str, int] = {}
    first = {row["session_id"]: i for i, row in reversed(list(enumerate(rows)))}
    found = []
    for i, row in enumerate(rows):
        session = row["session_id"]
        after = last.get(session, -1)
        if after < 0 and row["parent"] is not None:
            after = first[row["parent"]]
        last[session] = i
        blocks = tuple(row["hash_ids"][: row["input_length"] // BLOCK])
        found.append(
            Request(
                row["delay_ms"] / 1000,
                row["input_length"],
                max(1, row["output_length"]),
                blocks,
                session,
                after=after,
            )
        )
    return found


def ceiling(requests: Sequence[Request]) -> float:
    """Share of the prompt tokens that a cache without limits would have had: in order of arrival, all on one worker."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += hit_tokens(request, sum(1 for _ in _prefix(request.blocks, seen)))
        seen.update(request.blocks)
    return hits / max(1, sum(request.tokens for request in requests))


def _prefix(blocks: Sequence[int], seen: set[int]) -> Sequence[int]:
    for i, block in enumerate(blocks):
        if block not in seen:
            return blocks[:i]
    return blocks


def hit_tokens(request: Request, blocks: int) -> int:
    """Prompt tokens that so many leading blocks save; one token at least is always computed."""
    return min(blocks * BLOCK, request.tokens - 1)


def parts(requests: Sequence[Request], workers: int, speed: float, *, seed: int = 1) -> list[list[Request]]:
    """The trace for that many workers a pool, in the parts that are replayed one after the other; see the module.

    Args:
        workers: BASE_WORKERS divided or multiplied by a whole number.
    """
    if workers >= BASE_WORKERS:
        if workers % BASE_WORKERS:
            raise ValueError(f"{workers} workers are no multiple of {BASE_WORKERS}")
        return [_copies(requests, workers // BASE_WORKERS, speed, seed)]
    if BASE_WORKERS % workers:
        raise ValueError(f"{workers} workers do not divide {BASE_WORKERS}")
    return [_part(requests, n, BASE_WORKERS // workers, speed) for n in range(BASE_WORKERS // workers)]


def _sped(request: Request, speed: float) -> Request:
    return request if request.after >= 0 else replace(request, at=request.at / speed)


def _part(requests: Sequence[Request], n: int, of: int, speed: float) -> list[Request]:
    order = {session: i for i, session in enumerate(dict.fromkeys(r.session for r in requests))}
    kept = [i for i, r in enumerate(requests) if order[r.session] % of == n]
    place = {old: new for new, old in enumerate(kept)}
    return [
        replace(_sped(requests[i], speed), after=place.get(requests[i].after, -1 if requests[i].after < 0 else 0))
        for i in kept
    ]


def _copies(requests: Sequence[Request], copies: int, speed: float, seed: int) -> list[Request]:
    shared = {r.blocks[0] for r in requests if r.blocks}
    system = shared if len(shared) == 1 else set()
    draw = random.Random(seed)
    found: list[tuple[int, Request]] = []
    for copy in range(copies):
        shift = draw.uniform(0, SHIFT_S) if copies > 1 else 0.0
        base = len(requests) * copy
        for request in requests:
            blocks = tuple(b if b in system else b + (copy << 40) for b in request.blocks) if copy else request.blocks
            later = request.after >= 0
            found.append(
                (
                    len(found),
                    replace(
                        request,
                        at=request.at if later else (request.at + shift) / speed,
                        blocks=blocks,
                        session=f"{copy}.{request.session}",
                        after=request.after + base if later else -1,
                    ),
                )
            )
    found.sort(key=lambda entry: (entry[1].after >= 0, entry[1].at))
    place = {old: new for new, (old, _) in enumerate(found)}
    return [r if r.after < 0 else replace(r, after=place[r.after]) for _, r in found]
