"""The helper thread that sums pages: carries out StartSums for both cores. Numbers in, numbers out; it decides nothing.

At ctx it sums pages and then looks at their generation numbers, because a page may have been used anew. At gen it sums
what stands in our pages, part by part, and compares with what ctx sent, for every rank that holds a head. It only
reads, so the pages' owner may do as he likes meanwhile: the cores ignore results that nobody waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from tailrace.kernels.page_sums import slice_sums
from tailrace.transfer.core_events import SumJob, SumPart, SumsDone
from tailrace.transfer.page_plan import DTYPE_BYTES, PoolGeometry, owners
from tailrace.transfer.transports.base import Wake
from tailrace.transfer.transports.copying import Helper, Job


class PageSummer:
    """Sums pages of this worker.

    Args:
        ranks: our pages, one array [num_pages, bytes_per_page] uint8 a rank.
        geometry: of these pages, all ranks together.
        generations: [num_pages] uint64.
        wake: called when `poll` has something new.
    """

    def __init__(
        self, ranks: Sequence[np.ndarray], geometry: PoolGeometry, generations: np.ndarray, wake: Wake | None = None
    ) -> None:
        self._ranks, self._geometry, self._generations = ranks, geometry, generations
        self._helper: Helper[SumsDone] = Helper("page-sums", wake)

    def submit(self, job: SumJob) -> None:
        """Answered by one SumsDone; `wake` is called then."""
        self._helper.submit(_Summing(self, job))

    def poll(self) -> list[SumsDone]:
        return self._helper.drain()

    def close(self) -> None:
        self._helper.close()

    def flip(self, page: int, at: int, mask: int) -> None:
        """Tests: change one byte of a page of ours."""
        data = self._ranks[0][page]
        data[at % len(data)] ^= mask

    def sums_of(self, job: SumJob) -> SumsDone:
        """Sums of a source's pages, or whether a destination's pages have the expected ones."""
        if not job.expected:
            sums = self._whole(self._by_rank(job.parts))
            stands = [
                int(self._generations[parts[0].page]) == generation
                for parts, generation in zip(job.parts, job.generations, strict=True)
            ]
            return SumsDone(job.job, tuple(s.tobytes() if ok else b"" for s, ok in zip(sums, stands, strict=True)))
        return SumsDone(job.job, equal=tuple(self._equal(self._by_rank(job.parts), job.expected)))

    def _by_rank(self, parts: Sequence[tuple[SumPart, ...]]) -> list[np.ndarray]:
        """For each rank [units, layer * field, its heads] uint64."""
        geometry = self._geometry
        row_bytes = geometry.dim * DTYPE_BYTES[geometry.dtype]
        alike: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for unit, some in enumerate(parts):
            for part in some:
                alike[part.row, part.n, part.weight_from].append((unit, part.page))
        shape = (len(parts), geometry.num_layers * geometry.num_fields, geometry.heads_per_rank)
        found = []
        for memory in self._ranks:
            sums = np.zeros(shape, np.uint64)
            for (row, n, weight_from), members in alike.items():
                units, pages = zip(*members, strict=True)
                span = range(row, row + n)
                some = slice_sums(memory, pages, row_bytes, geometry.tokens_per_page, span, weight_from)
                sums[list(units)] += some.reshape(-1, *shape[1:])  # a unit has one part of a kind
            found.append(sums)
        return found

    def _whole(self, by_rank: list[np.ndarray]) -> np.ndarray:
        """[units, layer * field * kv_head] with every head of the model once."""
        parts = [by_rank[rank][:, :, :number] for rank, _, number in owners(self._geometry)]
        return np.concatenate(parts, axis=2).reshape(len(by_rank[0]), -1)

    def _equal(self, by_rank: list[np.ndarray], expected: Sequence[bytes]) -> Iterator[bool]:
        heads = self._geometry.kv_heads
        for unit, sums in enumerate(expected):
            whole = np.frombuffer(sums, np.uint64)
            if len(whole) != self._geometry.num_layers * self._geometry.num_fields * heads:
                yield False
                continue
            whole = whole.reshape(-1, heads)
            yield all(
                (by_rank[rank][unit] == whole[:, self._geometry.heads_of(rank)]).all()
                for rank in range(self._geometry.tp)
            )


class _Summing(Job[SumsDone]):
    def __init__(self, summer: PageSummer, job: SumJob) -> None:
        self._summer, self._job = summer, job
        self._done: SumsDone | None = None

    def steps(self) -> Iterator[bool]:
        self._done = self._summer.sums_of(self._job)
        yield True

    def result(self) -> SumsDone:
        assert self._done is not None
        return self._done
