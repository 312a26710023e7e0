"""What a placement was decided from, what was predicted and what came of it; and how another policy would have decided.

    Decision (at the choice) -> its request ends: Outcome -> Entry -> one line of the log (decision_log.py) -> `replay`

A decision keeps the candidates as the policy saw them, at most KEPT of them: where there are more, the soonest ones and
those that any of our policies would have taken. Pure; it knows no file and no worker.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.model.errors import ConfigError
from tailrace.router.policies import POLICIES, PlaceView, Policy, PrefillCandidate, choose
from tailrace.transfer.messages import Timing

KEPT = 16  # candidates of one decision, at most
_SOONEST = 8  # of them: the ones that would have the prompt ready first
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement.

    Attributes:
        at: seconds, on the clock of whoever decided; in the log since 1970.
        policy: that chose; empty where none was asked (a gen prefills itself, by the rule or for want of a ctx).
        leg: prefill | local.
        why: of leg local: chosen | fallback; else empty.
        waited_s: in the router's queue before it.
        predicted_s: from the choice to the first token: what is outstanding there, and its own prefill.
        num_candidates: that the policy saw; `candidates` may be fewer.
        bound, crowd_wait_s: as the policy was told (policies.PlaceView).
    """

    at: float
    request: str
    attempt: int
    num_tokens: int
    policy: str
    leg: str
    why: str
    waited_s: float
    chosen: str
    predicted_s: float
    num_candidates: int
    candidates: tuple[PrefillCandidate, ...]
    bound: str = ""
    crowd_wait_s: float | None = None

    @property
    def view(self) -> PlaceView:
        """What a policy may know of the request."""
        return PlaceView(self.num_tokens, self.bound, self.crowd_wait_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it. `ttft_s`: from the ingress's question to the first token there; `queue_s` and `prefill_s`: of
    it, on the worker's clock. 0 where there was none."""

    outcome: str
    ttft_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0

    @classmethod
    def of(cls, outcome: str, timing: Timing | None) -> Outcome:
        if timing is None:
            return cls(outcome)
        return cls(outcome, timing.ttft_s, timing.queue_s, timing.prefill_s, timing.cached_tokens)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log."""

    decision: Decision
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Replayed:
    """What another policy makes of an entry: its choice, and the seconds to the first token that were predicted for it.

    Loads are those of the log: what would have followed from other choices only a simulation tells.
    """

    entry: Entry
    chosen: str
    predicted_s: float

    @property
    def same(self) -> bool:
        return self.chosen == self.entry.decision.chosen


def snapshot(candidates: Sequence[PrefillCandidate], request: PlaceView, chosen: str) -> tuple[PrefillCandidate, ...]:
    """The candidates that a decision keeps."""
    if len(candidates) <= KEPT:
        return tuple(candidates)
    kept = {c.boot: c for c in heapq.nsmallest(_SOONEST, candidates, key=lambda c: (c.ready_s, c.last_chosen, c.boot))}
    holder = min(candidates, key=lambda c: (-c.cached_tokens, c.ready_s, c.last_chosen, c.boot))
    wanted = {chosen, holder.boot, *(policy(candidates, request) for policy in POLICIES.values())} - kept.keys()
    return (*kept.values(), *(c for c in candidates if c.boot in wanted))


def replay(entries: Iterable[Entry], policy: str | Policy) -> Iterator[Replayed]:
    """How a policy would have chosen; decisions that no policy made are left out.

    Raises:
        ConfigError: no policy of that name.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ConfigError(f"no policy {policy!r}; known are {', '.join(sorted(POLICIES))}")
        policy = POLICIES[policy]
    for entry in entries:
        candidates = entry.decision.candidates
        if candidates:
            chosen = choose(policy, candidates, entry.decision.view)
            yield Replayed(entry, chosen, next(c.ready_s for c in candidates if c.boot == chosen))


# ---------------------------------------------------------------------------------------------------------------- lines


def to_line(entry: Entry) -> str:
    """One JSON object, without the newline."""
    d, o = entry.decision, entry.outcome
    record: dict[str, Any] = {
        "v": _FORMAT, "time": round(d.at, 6), "request": d.request, "attempt": d.attempt, "tokens": d.num_tokens,
        "policy": d.policy, "leg": d.leg, "why": d.why, "waited_s": round(d.waited_s, 6), "chosen": d.chosen,
        "predicted_s": round(d.predicted_s, 6), "num_candidates": d.num_candidates,
        "candidates": [_rounded(candidate) for candidate in d.candidates],
        "bound": d.bound, "crowd_wait_s": None if d.crowd_wait_s is None else round(d.crowd_wait_s, 6),
        "outcome": o.outcome, "ttft_s": round(o.ttft_s, 6), "queue_s": round(o.queue_s, 6),
        "prefill_s": round(o.prefill_s, 6), "cached_tokens": o.cached_tokens,
    }  # fmt: skip
    return json.dumps(record, separators=(",", ":"))


def _rounded(candidate: PrefillCandidate) -> list[Any]:
    return [round(value, 6) if isinstance(value, float) else value for value in candidate]


def from_line(line: str) -> Entry:
    """Inverse of to_line. Raises ConfigError for a line that is none."""
    try:
        r = json.loads(line)
        if r["v"] != _FORMAT:
            raise ConfigError(f"a decision log of format {r['v']}, and this release reads {_FORMAT}")
        candidates = tuple(PrefillCandidate(*values) for values in r["candidates"])
        decision = Decision(
            r["time"], r["request"], r["attempt"], r["tokens"], r["policy"], r["leg"], r["why"], r["waited_s"],
            r["chosen"], r["predicted_s"], r["num_candidates"], candidates, r["bound"], r["crowd_wait_s"],
        )  # fmt: skip
        return Entry(decision, Outcome(r["outcome"], r["ttft_s"], r["queue_s"], r["prefill_s"], r["cached_tokens"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a line of a decision log: {line[:80]!r} ({error})") from None
