"""Which workers have which blocks of which prompts: what placement asks of every request.

    namespace -> block hash -> workers, as bits of one integer       a block hash names its whole prefix

A request's longest prefix on every worker is found in one walk along its hashes: the set of workers that have all so
far shrinks until it is empty. Workers whose pages are larger than a block say only every n-th hash; they are looked up
at those. Memory is bounded by what is cached: an entry lives as long as a worker holds the block, or as a request that
will bring it there is on its way (`expect`). Nothing is left of a worker that has left.

Knows no request, no load and no clock. What it says may be wrong (events on the way, a worker that has just evicted):
that costs time, never a token. If the router dies the next one asks the workers for their whole sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

HASH_BYTES = 16
WORD_BITS = 60
WORD = (1 << WORD_BITS) - 1
STRIDE = 8  # blocks that a walk looks ahead: a worker that has a block has all before it

Hashes = Iterable[tuple[bytes, bytes]]
"""(namespace, packed hashes) each."""


@dataclass(slots=True)
class _Worker:
    """`bit`: its place in the sets. `step`: blocks between two hashes that it says."""

    boot: str
    bit: int
    step: int
    held: dict[bytes, set[bytes]] = field(default_factory=dict)
    expected: dict[bytes, dict[bytes, int]] = field(default_factory=dict)  # -> how many requests bring it


@dataclass(frozen=True, slots=True)
class Level:
    """The workers in `mask` have at least `blocks` blocks of the prompt."""

    blocks: int
    mask: int


class Found:
    """What `find` has found of one prompt: blocks of its longest prefix on each worker."""

    def __init__(self, index: BlockIndex, levels: list[Level]) -> None:
        self.levels, self._index = levels, index

    def blocks(self, boot: str) -> int:
        if self.levels:
            bit = self._index.mask(boot)
            for level in self.levels:
                if level.mask & bit:
                    return level.blocks
        return 0


class BlockIndex:
    """See the module. A worker is known by its boot id from `join` to `leave`; others are ignored."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, dict[bytes, int]] = {}
        self._workers: dict[str, _Worker] = {}
        self._boots: list[str] = []  # by bit; empty: free
        self._classes: dict[int, int] = {}  # step -> its workers' mask

    # --------------------------------------------------------------------------------------------------------- workers

    def join(self, boot: str, step: int = 1) -> None:
        """`step`: blocks a granule of its index, at least 1. One that is known with another step begins anew."""
        known = self._workers.get(boot)
        if known is not None and known.step == step:
            return
        self.leave(boot)
        place = next((i for i, name in enumerate(self._boots) if not name), len(self._boots))
        self._boots[place : place + 1] = [boot]
        self._workers[boot] = _Worker(boot, 1 << place, step)
        self._classes[step] = self._classes.get(step, 0) | 1 << place

    def leave(self, boot: str) -> None:
        """It is gone, and nothing that it held can be found any more."""
        worker = self._workers.pop(boot, None)
        if worker is None:
            return
        for namespace in (*worker.held, *worker.expected):
            self._clear(namespace, worker.bit, worker.held.pop(namespace, ()))
            self._clear(namespace, worker.bit, worker.expected.pop(namespace, ()))
        self._boots[worker.bit.bit_length() - 1] = ""
        while self._boots and not self._boots[-1]:
            self._boots.pop()
        self._classes[worker.step] &= ~worker.bit
        if not self._classes[worker.step]:
            del self._classes[worker.step]

    # ---------------------------------------------------------------------------------------------------------- events

    def change(self, boot: str, stored: Hashes = (), removed: Hashes = (), *, cleared: bool = False) -> None:
        """What a worker says of itself. Hashes that it had already, or never had, change nothing."""
        worker = self._workers.get(boot)
        if worker is None:
            return
        if cleared:
            for namespace in tuple(worker.held):
                self._drop(worker, namespace, tuple(worker.held[namespace]))
        for namespace, packed in removed:
            self._drop(worker, namespace, split(packed))
        for namespace, packed in stored:
            held, hashes = worker.held.setdefault(namespace, set()), split(packed)
            held.update(hashes)
            self._set(namespace, worker.bit, hashes)
            if not held:
                del worker.held[namespace]

    def _drop(self, worker: _Worker, namespace: bytes, hashes: Iterable[bytes]) -> None:
        held, expected = worker.held.get(namespace), worker.expected.get(namespace, {})
        if held is None:
            return
        gone = held.intersection(hashes)
        held -= gone
        if not held:
            del worker.held[namespace]
        self._clear(namespace, worker.bit, gone.difference(expected))

    def expect(self, boot: str, namespace: bytes, packed: bytes) -> None:
        """A request will bring these blocks there. Ended by `unexpect` with the same arguments."""
        worker = self._workers.get(boot)
        if worker is not None and (hashes := self._steps(packed, worker.step)):
            expected = worker.expected.setdefault(namespace, {})
            for key in hashes:
                expected[key] = expected.get(key, 0) + 1
            self._set(namespace, worker.bit, hashes)

    def unexpect(self, boot: str, namespace: bytes, packed: bytes) -> None:
        worker = self._workers.get(boot)
        expected = worker.expected.get(namespace) if worker is not None else None
        if worker is None or expected is None:
            return
        gone = []
        for key in self._steps(packed, worker.step):
            left = expected.get(key, 0) - 1
            if left > 0:
                expected[key] = left
            elif expected.pop(key, None) is not None:
                gone.append(key)
        if not expected:
            del worker.expected[namespace]
        held = worker.held.get(namespace, ())
        self._clear(namespace, worker.bit, (key for key in gone if key not in held))

    @staticmethod
    def _steps(packed: bytes, step: int) -> list[bytes]:
        wide = step * HASH_BYTES
        return [packed[end - HASH_BYTES : end] for end in range(wide, len(packed) + 1, wide)]

    def _set(self, namespace: bytes, bit: int, hashes: Iterable[bytes]) -> None:
        space = self._spaces.setdefault(namespace, {})
        for key in hashes:
            mask = space.get(key)
            space[key] = bit if mask is None else mask | bit
        if not space:
            del self._spaces[namespace]

    def _clear(self, namespace: bytes, bit: int, hashes: Iterable[bytes]) -> None:
        space = self._spaces.get(namespace)
        if space is None:
            return
        for key in hashes:
            left = space.get(key, 0) & ~bit
            if left:
                space[key] = left
            else:
                space.pop(key, None)
        if not space:
            del self._spaces[namespace]

    # ------------------------------------------------------------------------------------------------------- questions

    def levels(self, namespace: bytes, packed: bytes, most_blocks: int) -> list[Level]:
        """Who has how much of a prompt, longest first; each level's workers are among those of the shorter ones of the
        same step. None if nobody has any.

        Args:
            packed: the hashes of its full blocks, in order.
            most_blocks: the longest prefix that is of use.
        """
        space = self._spaces.get(namespace)
        if space is None:
            return []
        found: list[Level] = []
        for step, mask in self._classes.items():
            last = min(most_blocks, len(packed) // HASH_BYTES) // step
            found += _walk(space, packed, step, mask, last)
        found.sort(key=lambda level: -level.blocks)
        return found

    def find(self, namespace: bytes, packed: bytes, most_blocks: int) -> Found:
        """As `levels`, to be asked worker by worker until something changes."""
        return Found(self, self.levels(namespace, packed, most_blocks))

    def cached_blocks(self, namespace: bytes, packed: bytes, most_blocks: int) -> dict[str, int]:
        """Boot id -> blocks of the longest prefix that it has; those who have none are left out."""
        cached: dict[str, int] = {}
        for level in self.levels(namespace, packed, most_blocks):
            for boot in self.boots(level.mask):
                cached.setdefault(boot, level.blocks)
        return cached

    def boots(self, mask: int) -> Iterator[str]:
        """The workers of a set."""
        return map(self._boots.__getitem__, places(mask))

    def mask(self, boot: str) -> int:
        """The set of one worker; empty if it is not known."""
        worker = self._workers.get(boot)
        return worker.bit if worker is not None else 0

    def held(self, boot: str) -> dict[bytes, frozenset[bytes]]:
        """Namespace -> hashes that a worker has said it holds."""
        worker = self._workers.get(boot)
        return {n: frozenset(hashes) for n, hashes in worker.held.items()} if worker is not None else {}

    def num_held(self, boot: str) -> int:
        worker = self._workers.get(boot)
        return sum(map(len, worker.held.values())) if worker is not None else 0

    def __len__(self) -> int:
        """Distinct (namespace, hash) entries."""
        return sum(map(len, self._spaces.values()))

    def check(self) -> None:
        """AssertionError unless the entries are exactly what the workers hold or will hold. For tests: it is slow."""
        masks: dict[tuple[bytes, bytes], int] = {}
        for worker in self._workers.values():
            for blocks in (worker.held, worker.expected):
                for namespace, hashes in blocks.items():
                    assert hashes, f"{worker.boot} keeps an empty namespace"
                    for key in hashes:
                        masks[namespace, key] = masks.get((namespace, key), 0) | worker.bit
        entries = {(name, key): mask for name, space in self._spaces.items() for key, mask in space.items()}
        assert entries == masks, "an entry has other workers than say so"
        assert all(self._spaces.values()), "an empty namespace is kept"


def places(mask: int) -> Iterator[int]:
    """The numbers of a set's bits, lowest first."""
    start = 0
    while mask:  # by words: arithmetic with all bits of a thousand workers takes long
        word = mask & WORD
        while word:
            low = word & -word
            yield start + low.bit_length() - 1
            word ^= low
        mask >>= WORD_BITS
        start += WORD_BITS


def split(packed: bytes) -> list[bytes]:
    """The single hashes of a packed run; what is left over at its end is none."""
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed) - HASH_BYTES + 1, HASH_BYTES)]


def _walk(space: dict[bytes, int], packed: bytes, step: int, mask: int, last: int) -> list[Level]:
    """The levels of the workers in `mask`, longest first, along every `step`-th hash up to the `last` of those."""
    get, wide, leap = space.get, step * HASH_BYTES, STRIDE * step * HASH_BYTES
    levels: list[Level] = []
    at, end = 0, last * wide
    while at < end:
        ahead = at + leap
        if ahead <= end and get(packed[ahead - HASH_BYTES : ahead], 0) & mask == mask:
            at = ahead
            continue
        both = get(packed[at + wide - HASH_BYTES : at + wide], 0) & mask
        if both != mask:
            if at:
                levels.append(Level(at // HASH_BYTES, mask))
            mask = both
            if not mask:
                break
        at += wide
    else:
        if at and mask:
            levels.append(Level(at // HASH_BYTES, mask))
    levels.reverse()
    return levels
