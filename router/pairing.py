"""Which gen is paired with which ctx. A pure function; the router sends each gen its whole set when it changes.

Each worker has at most `limit` peers. While there are few workers everybody is paired with everybody. Beyond that,
existing pairs stay, a ctx that is wanted and has no pair takes the place of the least recently used idle pair, and what
room is left is filled evenly, the ctx with the fewest peers first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence, Set

Pair = tuple[str, str]
"""(gen boot id, ctx boot id)."""


def assign_pairs(
    gens: Sequence[str],
    ctxs: Sequence[str],
    current: Mapping[str, Sequence[str]],
    limit: int,
    *,
    last_used: Mapping[Pair, float],
    busy: Set[Pair],
    wanted: Sequence[str] = (),
) -> dict[str, tuple[str, ...]]:
    """The ctx workers of each gen.

    Args:
        current: the former answer; dead workers in it are dropped.
        last_used: when a pair was last bound; absent: never.
        busy: pairs that a hand-off needs now; they are not replaced.
        wanted: ctx workers that shall have a pair, if they have none.
    """
    alive = set(ctxs)
    pairs = {gen: [ctx for ctx in current.get(gen, ()) if ctx in alive][:limit] for gen in gens}
    peers: Counter[str] = Counter(ctx for of_gen in pairs.values() for ctx in of_gen)
    for ctx in wanted:
        if ctx in alive and not peers[ctx]:
            _give_a_pair(ctx, pairs, peers, limit, last_used, busy)
    _fill(pairs, ctxs, peers, limit)
    return {gen: tuple(of_gen) for gen, of_gen in pairs.items()}


def _give_a_pair(
    ctx: str, pairs: dict[str, list[str]], peers: Counter[str], limit: int,
    last_used: Mapping[Pair, float], busy: Set[Pair],
) -> None:  # fmt: skip
    roomy = min(pairs, key=lambda gen: len(pairs[gen]), default=None)
    if roomy is None:
        return
    if len(pairs[roomy]) >= limit:
        idle = [(gen, old) for gen, of_gen in pairs.items() for old in of_gen if (gen, old) not in busy]
        if not idle:
            return
        # A peer that has other pairs loses less.
        roomy, old = min(idle, key=lambda pair: (peers[pair[1]] == 1, last_used.get(pair, -1.0)))
        pairs[roomy].remove(old)
        peers[old] -= 1
    pairs[roomy].append(ctx)
    peers[ctx] += 1


def _fill(pairs: dict[str, list[str]], ctxs: Sequence[str], peers: Counter[str], limit: int) -> None:
    order = {gen: i for i, gen in enumerate(pairs)}
    room = [(len(of_gen), order[gen], gen) for gen, of_gen in pairs.items() if len(of_gen) < limit]
    heapq.heapify(room)
    waiting = [(peers[ctx], i, ctx) for i, ctx in enumerate(ctxs) if peers[ctx] < limit]
    heapq.heapify(waiting)
    while room and waiting:
        count, i, ctx = heapq.heappop(waiting)
        passed_over = []
        while room:
            used, place, gen = heapq.heappop(room)
            if ctx in pairs[gen]:
                passed_over.append((used, place, gen))
                continue
            pairs[gen].append(ctx)
            peers[ctx] += 1
            if used + 1 < limit:
                heapq.heappush(room, (used + 1, place, gen))
            if count + 1 < limit:
                heapq.heappush(waiting, (count + 1, i, ctx))
            break
        for entry in passed_over:
            heapq.heappush(room, entry)
