"""Page sums at gen: a page counts as arrived only when its sums, as ctx took them, are those of what gen holds.

    bind            WantSums to ctx: which pages, and from which token on
    copy returned   the page waits for its sums (kernels/page_sums.py, taken by ctx when the page became final)
    both here       StartSums: the helper thread sums what stands in our pages
    equal           proven: the unit is set in the bitmap
    not equal       the first time it is brought over again; the second time ctx is told not to trust it (Mistrust), and
                    the hand-off is given up

So a byte that changes in ctx's pool after the page was summed, in staging or landing memory, on the wire, or in our
pages until they were summed, is found before anything is decoded. What changes later, or was wrong when ctx summed it,
is not: the shadow check looks for that. Where a lossy codec lies between, sums cannot be equal, and only the landing
chunk's checksum covers the bytes; then every copy counts as proven.

Decides only; the core carries out. Pure data apart from that; dies with its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tailrace.transfer.bitmap import Unit, ranges
from tailrace.transfer.core_events import StartSums, SumJob, SumPart, SumsDone
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import PageDescriptor, Sums, WantSums

Parts = Callable[[Unit], tuple[SumPart, ...]]
"""Where a unit's tokens stand in our pages, with the rows of ctx's page that they came from."""


@dataclass(slots=True)
class Proof:
    """What is known of one hand-off's pages.

    Attributes:
        exact: whether sums can be compared; False behind a lossy codec.
        first_token: the first that is brought over; rows before it are not summed.
        sums: by unit, (generation, sums) as ctx sent them.
        copied: here and not proven yet.
        jobs: of the helper thread, under way.
        doubted: were wrong once, and have been asked for again.
    """

    exact: bool
    first_token: int
    sums: dict[Unit, tuple[int, bytes]] = field(default_factory=dict)
    copied: dict[Unit, PageDescriptor] = field(default_factory=dict)
    checking: set[Unit] = field(default_factory=set)
    jobs: set[int] = field(default_factory=set)
    doubted: set[Unit] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`proven` may be set; `again` must be brought over again; `wrong` were wrong twice."""

    proven: tuple[PageDescriptor, ...] = ()
    again: tuple[PageDescriptor, ...] = ()
    wrong: tuple[PageDescriptor, ...] = ()


class PageProofs:
    """Jobs of all hand-offs of a worker."""

    def __init__(self) -> None:
        self._num_jobs = 0
        self._jobs: dict[int, tuple[Key, tuple[Unit, ...]]] = {}

    def ask(self, key: Key, proof: Proof | None, units: Iterable[Unit]) -> list[WantSums]:
        """Ask ctx for the sums of those of the units that lack them; also to repeat what may have been lost."""
        if proof is None or not proof.exact:
            return []
        lacking = [unit for unit in units if unit not in proof.sums]
        return [WantSums(*key, proof.first_token, ranges(lacking))] if lacking else []

    def told(self, proof: Proof | None, frame: Sums) -> bool:
        """Take a frame's sums; False if it is malformed, or nobody asked."""
        size, rest = divmod(len(frame.sums), max(1, len(frame.pages)))
        if proof is None or rest or not size:
            return False
        for i, page in enumerate(frame.pages):
            unit = Unit(page.group, page.ordinal)
            proof.sums.setdefault(unit, (page.generation, frame.sums[i * size : (i + 1) * size]))
        return True

    def copied(self, proof: Proof | None, pages: Iterable[PageDescriptor]) -> tuple[PageDescriptor, ...]:
        """These stand in our pages. Returns those that need no proof."""
        if proof is None or not proof.exact:
            return tuple(pages)
        proof.copied.update({Unit(page.group, page.ordinal): page for page in pages})
        return ()

    def check(self, key: Key, proof: Proof | None, parts: Parts) -> list[StartSums]:
        """Sum what is here and whose sums are known, in one job."""
        units = [] if proof is None else [u for u in proof.copied if u in proof.sums and u not in proof.checking]
        if proof is None or not units:
            return []
        self._num_jobs += 1
        self._jobs[self._num_jobs] = (key, tuple(units))
        proof.jobs.add(self._num_jobs)
        proof.checking.update(units)
        expected = tuple(proof.sums[unit][1] for unit in units)
        return [StartSums(SumJob(self._num_jobs, tuple(parts(unit) for unit in units), expected=expected))]

    def key_of(self, job: int) -> Key | None:
        """Whose job it was. The hand-off may be gone."""
        entry = self._jobs.get(job)
        return None if entry is None else entry[0]

    def done(self, proof: Proof | None, event: SumsDone) -> Verdict:
        """What follows from a job's end; nothing if its hand-off is gone (`proof` None, or one of another bind)."""
        _, units = self._jobs.pop(event.job)
        if proof is None or event.job not in proof.jobs:
            return Verdict()
        proof.jobs.discard(event.job)
        proven, wrong = [], []
        for unit, equal in zip(units, event.equal, strict=True):
            proof.checking.discard(unit)
            page = proof.copied.pop(unit)
            (proven if equal and proof.sums[unit][0] == page.generation else wrong).append(page)
        chance = self.doubt(proof, [Unit(page.group, page.ordinal) for page in wrong])
        again = tuple(page for page in wrong if Unit(page.group, page.ordinal) in chance)
        return Verdict(tuple(proven), again, tuple(page for page in wrong if page not in again))

    @staticmethod
    def doubt(proof: Proof, units: Iterable[Unit]) -> set[Unit]:
        """These were wrong. Returns those of them that were never wrong before: they get a second chance."""
        again = set(units) - proof.doubted
        proof.doubted |= again
        return again
