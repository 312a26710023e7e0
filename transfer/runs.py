"""What a gen worker's loop runs: local prefills, and decodes after their hand-off. Leases and cancels; no pages.

The loop owns the pages of a run and says its last word by `ended` or `failed`; until then the run is reported to the
router as held here. Part of the gen core, as pure as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.transfer.core_events import Action, Measure, Metric, ToIngress, ToLoop
from tailrace.transfer.leases import Leases, Recent
from tailrace.transfer.loop_events import Arrived, Cancelled, Key
from tailrace.transfer.messages import Fail, Held, Submit


@dataclass(slots=True)
class _Run:
    leg: str  # local | decode
    pages: int
    deadline: float | None = None
    cancelled: bool = False
    streaming: bool = False  # its first token is there: no prefill is left


class Runs:
    """Runs by key.

    Args:
        leases: the request leases, shared with the hand-offs: a run inherits that of its hand-off.
        recent: how ended keys ended, shared likewise.
    """

    def __init__(self, leases: Leases[Key], recent: Recent[Key, str]) -> None:
        self._leases, self._recent = leases, recent
        self._runs: dict[Key, _Run] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def wanted(self, key: Key) -> bool:
        """Whether the loop has it and nobody has cancelled it."""
        run = self._runs.get(key)
        return run is not None and not run.cancelled

    def arrive(self, submit: Submit, pages: int, now: float) -> list[Action]:
        """A local prefill: the loop does all of it."""
        key = (submit.request, submit.attempt)
        deadline = None if submit.timeout_s is None else now + submit.timeout_s
        self._runs[key] = _Run("local", pages, deadline)
        self._leases.grant(key, now, submit.lease_s)
        return [ToLoop(Arrived(submit, now))]

    def admit(self, key: Key, pages: int) -> None:
        """A decode begins; its lease runs on."""
        self._runs[key] = _Run("decode", pages, streaming=True)

    def token_sent(self, key: Key) -> None:
        """The loop has drawn a token of it."""
        self._runs[key].streaming = True

    def cancel(self, key: Key, reason: str) -> list[Action]:
        run = self._runs[key]
        if run.cancelled:
            return [Measure(Metric.STALE_FRAMES)]
        run.cancelled = True
        self._leases.drop(key)
        return [ToLoop(Cancelled(key, reason))]

    def ended(self, key: Key, outcome: str) -> bool:
        """The loop's last word; True if it ended by itself, not by a cancel. False for an unknown key, too."""
        run = self._runs.pop(key, None)
        if run is None:
            return False
        self._leases.drop(key)
        self._recent.put(key, outcome)
        return not run.cancelled

    def overdue(self, now: float) -> list[Action]:
        """Tell and cancel what has passed its deadline."""
        actions: list[Action] = []
        for key, run in list(self._runs.items()):
            if run.deadline is not None and now >= run.deadline and not run.cancelled:
                actions.append(ToIngress(key, Fail(*key, "timeout", "deadline passed", False)))
                actions += self.cancel(key, "timeout")
        return actions

    def holding(self) -> list[Held]:
        return [
            Held(*key, pages=run.pages, needs=0, leg=run.leg, seconds_left=0.0 if run.streaming else None)
            for key, run in self._runs.items()
            if not run.cancelled
        ]
