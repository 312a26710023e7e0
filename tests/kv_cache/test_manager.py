"""The manager: prefix reuse, eviction, quarantine and poison, on a tiny pool."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tailrace.kv_cache.block_hash import BlockHasher, namespace
from tailrace.kv_cache.layout import PageLayout, single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import ConfigError, LedgerError
from tailrace.model.state_groups import Field, GroupKind, StateGroup

GROUP = StateGroup(GroupKind.HISTORY, (0, 1), (Field("k", 2, 4), Field("v", 2, 4)))
NS = namespace("rev|x", "float32/exact")


def _layout(tokens_per_page: int) -> PageLayout:
    return single_layout([GROUP], tokens_per_page, "float32")


class Worker:
    """A manager, and sequences as a loop would keep them."""

    def __init__(self, num_pages: int = 17, page: int = 4, block: int = 4) -> None:
        self.kv = KvManager(_layout(page), num_pages, block)
        self.hasher = BlockHasher(b"s", block)

    def hashes(self, ids: list[int], scope: str = "x") -> bytes:
        return self.hasher.hash_blocks(scope, ids)

    def run(self, ids: list[int], space: bytes = NS, scope: str = "x") -> list[int]:
        """Prefill ids, publish them, let go; returns the pages."""
        kv = self.kv
        hit = kv.match_prefix(space, self.hashes(ids, scope), len(ids))
        more = kv.allocate(kv.layout.num_pages(len(ids)) - len(hit.pages))
        assert more is not None
        pages = hit.pages + more
        kv.publish(space, self.hashes(ids, scope), pages, len(ids))
        kv.release(pages)
        kv.check()
        return pages

    def cached(self, ids: list[int], space: bytes = NS, scope: str = "x", *, whole: bool = True) -> int:
        """Tokens of ids that are known now."""
        hit = self.kv.match_prefix(space, self.hashes(ids, scope), len(ids), whole=whole)
        self.kv.release(hit.pages)
        return hit.num_tokens


A, B, C = list(range(100, 116)), list(range(200, 216)), list(range(300, 316))  # 4 pages of 4 tokens each


def test_a_second_request_finds_the_pages_of_the_first():
    worker = Worker()
    pages = worker.run(A)
    hit = worker.kv.match_prefix(NS, worker.hashes(A), 16, whole=True)
    assert hit.pages == pages and hit.num_tokens == 16
    assert worker.kv.counts().held == 4
    worker.kv.release(hit.pages)
    assert worker.kv.counts().cached == 4


@pytest.mark.parametrize(("num_tokens", "found"), [(16, 12), (17, 16), (13, 12), (12, 8), (4, 0), (5, 4), (1, 0)])
def test_a_match_ends_at_least_one_token_before_the_prompts_end(num_tokens, found):
    worker = Worker()
    worker.run([*A, 999])
    ids = [*A, 999][:num_tokens]
    assert worker.cached(ids, whole=False) == found


@pytest.mark.parametrize(("num_tokens", "found"), [(16, 16), (17, 16), (13, 12), (4, 4), (3, 0)])
def test_a_gen_that_only_reads_state_may_match_every_full_block(num_tokens, found):
    worker = Worker()
    worker.run([*A, 999])
    assert worker.cached([*A, 999][:num_tokens]) == found


@pytest.mark.parametrize(("page", "block"), [(4, 4), (4, 16), (16, 4), (1, 8), (8, 1), (8, 2)])
def test_page_sizes_that_divide_or_are_a_multiple_of_the_block_both_work(page, block):
    worker = Worker(num_pages=80, page=page, block=block)
    ids = list(range(40))
    pages = worker.run(ids)
    granule = max(page, block)
    for n in range(1, 41):
        hit = worker.kv.match_prefix(NS, worker.hashes(ids[:n]), n)
        assert hit.num_tokens == (n - 1) // granule * granule
        assert hit.pages == pages[: hit.num_tokens // page]
        worker.kv.release(hit.pages)
    other = ids[:granule] + [7] * 40
    assert worker.cached(other) == granule
    worker.kv.check()


@pytest.mark.parametrize(("page", "block"), [(4, 6), (12, 8), (3, 64)])
def test_sizes_of_which_neither_divides_the_other_are_refused(page, block):
    with pytest.raises(ConfigError, match=f"{page}.*{block}"):
        KvManager(_layout(page), 8, block)


def test_a_family_with_several_state_groups_is_refused_naming_the_limit():
    with pytest.raises(ConfigError, match="2 state groups; a page pool holds 1"):
        single_layout([GROUP, GROUP], 16, "float32")
    with pytest.raises(ConfigError, match="int4"):
        single_layout([GROUP], 16, "int4")


def test_tenants_do_not_see_each_others_pages():
    worker = Worker()
    worker.run(A, namespace("rev|x", "f"), "rev|x")
    assert worker.cached(A, namespace("rev|y", "f"), "rev|y") == 0
    assert worker.cached(A, namespace("rev|y", "f"), "rev|x") == 0, "not even with the other tenant's hashes"
    assert worker.cached(A, namespace("rev|x", "f"), "rev|x") == 16


def test_a_lossy_page_does_not_enter_an_exact_namespace():
    worker = Worker()
    worker.run(A, namespace("rev|x", "int8"))
    assert worker.cached(A, namespace("rev|x", "exact")) == 0


def test_the_first_publisher_wins_and_the_second_copy_stays_private():
    worker = Worker()
    kv = worker.kv
    first, second = kv.allocate(4), kv.allocate(4)
    assert first is not None and second is not None
    kv.publish(NS, worker.hashes(A), first, 16)
    kv.publish(NS, worker.hashes(A), second, 16)
    hit = kv.match_prefix(NS, worker.hashes(A), 16, whole=True)
    assert hit.pages == first
    for pages in (hit.pages, first, second):
        kv.release(pages)
    counts = kv.counts()
    assert (counts.cached, counts.free) == (4, 12)
    kv.check()


def test_the_second_publisher_adds_what_the_first_had_not():
    worker = Worker()
    kv = worker.kv
    first, second = kv.allocate(2), kv.allocate(4)
    assert first is not None and second is not None
    kv.publish(NS, worker.hashes(A[:8]), first, 8)
    kv.publish(NS, worker.hashes(A), second, 16)
    hit = kv.match_prefix(NS, worker.hashes(A), 16, whole=True)
    assert hit.pages == first + second[2:]
    for pages in (hit.pages, first, second):
        kv.release(pages)
    assert kv.counts().cached == 4
    kv.check()


def test_only_full_granules_are_published():
    worker = Worker()
    kv = worker.kv
    pages = kv.allocate(4)
    assert pages is not None
    kv.publish(NS, worker.hashes(A), pages, 15)
    kv.release(pages)
    assert kv.counts().cached == 3


def test_a_sequence_that_gave_pages_back_is_published_up_to_the_gap():
    worker = Worker()
    kv = worker.kv
    pages = kv.allocate(4)
    assert pages is not None
    kv.publish(NS, worker.hashes(A), [pages[0], 0, pages[2], pages[3]], 16)
    kv.release(pages)
    assert kv.counts().cached == 1


def test_publishing_with_too_few_pages_is_an_error():
    worker = Worker()
    pages = worker.kv.allocate(2)
    assert pages is not None
    with pytest.raises(LedgerError, match="2 pages do not cover the 16 tokens"):
        worker.kv.publish(NS, worker.hashes(A), pages, 16)


def test_the_least_recently_used_goes_first_and_its_leaf_before_its_root():
    worker = Worker(num_pages=13)
    worker.run(A), worker.run(B), worker.run(C)
    assert worker.cached(A[:8]) == 8, "the beginning of A has been used again"
    assert worker.kv.counts().free == 0
    taken = worker.kv.allocate(3)
    assert taken is not None
    assert [worker.cached(ids) for ids in (A, B, C)] == [8, 12, 16], "A's two unused leaves, then B's last page"
    worker.kv.check()


def test_held_and_pinned_pages_are_not_evicted():
    worker = Worker(num_pages=9)
    pages_a = worker.run(A)
    kv = worker.kv
    kv.pin(pages_a[:2])
    hit = kv.match_prefix(NS, worker.hashes(A), 16, whole=True)
    worker.run(B)
    assert kv.available() == 4
    assert kv.allocate(5) is None
    assert worker.cached(B) == 16, "what does not fit evicts nothing"
    taken = kv.allocate(4)
    assert taken is not None and not set(taken) & set(pages_a)
    kv.release(hit.pages)
    assert kv.allocate(3) is None, "two pages are still pinned"
    got = kv.allocate(2)
    assert got is not None and sorted(got) == sorted(pages_a[2:])
    kv.check()


def test_everything_that_counts_as_available_can_be_allocated():
    """Also cached pages that stand between pages in use: a node with a used child, a granule used in part."""
    worker = Worker(num_pages=9, page=4, block=8)
    kv = worker.kv
    first, second = kv.allocate(2), kv.allocate(4)
    assert first is not None and second is not None
    ids = list(range(16))
    kv.publish(NS, worker.hashes(ids[:8]), first, 8)
    kv.publish(NS, worker.hashes(ids), second, 16)  # its first granule stays private, its second hangs below `first`
    kv.release(first)
    kv.release(second[:3])
    assert kv.counts().cached == 3 and kv.available() == 7
    taken = kv.allocate(7)
    assert taken is not None and second[3] not in taken
    kv.check()
    kv.release([second[3]])
    assert kv.counts().cached == 0, "the page whose prefix is gone became private"


def test_quarantine_takes_over_the_hold_and_keeps_the_page_from_everyone():
    worker = Worker(num_pages=5)
    kv = worker.kv
    pages = kv.allocate(4)
    assert pages is not None
    kv.quarantine(pages[:2])
    kv.release(pages[2:])
    assert kv.counts().quarantined == 2
    assert kv.allocate(3) is None
    kv.end_quarantine(pages[:2])
    assert kv.counts().free == 4
    with pytest.raises(LedgerError, match=f"page {pages[0]} is free"):
        kv.end_quarantine(pages[:1])


def test_nobody_quarantines_a_published_page_because_nobody_writes_it():
    worker = Worker()
    worker.run(A)
    hit = worker.kv.match_prefix(NS, worker.hashes(A), 16, whole=True)
    with pytest.raises(LedgerError, match="published True"):
        worker.kv.quarantine(hit.pages)


def test_generations_stand_while_a_page_is_in_use_and_rise_when_it_is_used_anew():
    generations = np.zeros(9, np.uint64)
    kv = KvManager(_layout(4), 9, 4, generations)
    pages = kv.allocate(8)
    assert pages is not None
    seen = [kv.descriptor_generation(p) for p in pages]
    kv.pin(pages)
    kv.release(pages)
    assert [kv.descriptor_generation(p) for p in pages] == seen
    kv.unpin(pages)
    assert [kv.descriptor_generation(p) for p in pages] == seen, "free, but not written yet"
    again = kv.allocate(8)
    assert again == pages
    assert all(kv.descriptor_generation(p) > s for p, s in zip(pages, seen, strict=True))
    assert int(generations[pages[0]]) == kv.descriptor_generation(pages[0])


def test_poison_comes_after_the_generation_and_before_the_next_owner():
    generations = np.zeros(9, np.uint64)
    kv = KvManager(_layout(4), 9, 4, generations)
    log: list[tuple[str, list[int], list[int]]] = []

    def fill(pages):
        assert kv.counts().total == 8, "the lock is free while poison is filled in"
        log.append(("fill", list(pages), generations[list(pages)].tolist()))

    kv.set_poison(fill)
    first = kv.allocate(3)
    assert first is not None and log == []
    kv.release(first)
    assert log == [("fill", first, [2, 2, 2])]
    again = kv.allocate(3)
    assert again == first and generations[first].tolist() == [3, 3, 3]


@pytest.mark.parametrize("how", ["evicted", "unpinned", "out of quarantine", "dropped"])
def test_pages_are_poisoned_however_they_become_free(how):
    worker = Worker(num_pages=5)
    kv = worker.kv
    filled: list[int] = []
    pages = worker.run(A) if how in ("evicted", "dropped") else kv.allocate(4)
    assert pages is not None
    kv.set_poison(filled.extend)
    if how == "evicted":
        assert kv.allocate(4) == pages
    elif how == "dropped":
        kv.drop_cache()
    elif how == "unpinned":
        kv.pin(pages)
        kv.release(pages)
        assert filled == []
        kv.unpin(pages)
    else:
        kv.quarantine(pages)
        kv.end_quarantine(pages)
    assert sorted(filled) == pages
    kv.check()


def test_a_page_is_not_given_out_while_it_is_being_poisoned():
    kv = KvManager(_layout(4), 3, 4)
    inside, go_on = threading.Event(), threading.Event()

    def fill(pages):
        inside.set()
        assert go_on.wait(10)

    pages = kv.allocate(2)
    assert pages is not None
    kv.set_poison(fill)
    releasing = threading.Thread(target=kv.release, args=(pages,))
    releasing.start()
    assert inside.wait(10)
    assert kv.counts().free == 2 and kv.allocate(1) is None
    kv.check()
    go_on.set()
    releasing.join(10)
    assert kv.allocate(2) == pages


def test_dropping_the_cache_frees_what_is_idle_and_makes_private_what_is_used():
    worker = Worker()
    worker.run(A)
    kv = worker.kv
    hit = kv.match_prefix(NS, worker.hashes(A), 8)
    kv.drop_cache()
    assert worker.cached(A) == 0
    kv.release(hit.pages)
    assert kv.counts().free == 16
    kv.check()


def test_a_retracted_page_is_found_by_nobody_and_takes_longer_prefixes_along():
    worker = Worker()
    pages = worker.run(A)
    worker.run(B)
    worker.kv.retract(pages[1:2])
    assert worker.cached(A) == 4 and worker.cached(B) == 16
    assert worker.kv.counts().cached == 5 and worker.kv.counts().free == 11
    worker.kv.check()
    again = worker.run(A)
    assert worker.cached(A) == 16 and again[0] == pages[0]


def test_who_holds_a_retracted_page_cannot_publish_it_again_but_its_next_owner_can():
    worker = Worker(num_pages=9)
    worker.run(A)
    hit = worker.kv.match_prefix(NS, worker.hashes(A), 16, whole=True)
    worker.kv.retract(hit.pages[2:3])
    assert worker.kv.counts().held == 4
    worker.kv.publish(NS, worker.hashes(A), hit.pages, 16)
    assert worker.cached(A) == 8
    worker.kv.release(hit.pages)
    worker.kv.check()
    worker.run(A)
    worker.run(B)  # all eight pages have had another owner since
    assert worker.cached(A) == 16 and worker.cached(B) == 16


def test_two_threads_keep_the_books_right():
    worker = Worker(num_pages=33)
    kv = worker.kv
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for i in range(300):
                ids = [int(x) for x in rng.integers(0, 3, 4).repeat(4)]
                hit = kv.match_prefix(NS, worker.hashes(ids), 16)
                more = kv.allocate(4 - len(hit.pages))
                pages = hit.pages + (more or [])
                if more is not None:
                    kv.publish(NS, worker.hashes(ids), pages, 16)
                kv.pin(pages)
                kv.release(pages)
                if i % 7 == 0:
                    kv.check()
                kv.unpin(pages)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    kv.check()
    assert kv.counts().used == 0


def test_a_namespace_without_entries_is_forgotten():
    worker = Worker(num_pages=5)
    for tenant in range(50):
        worker.run(A, namespace(f"t{tenant}", "f"), f"t{tenant}")
    assert len(worker.kv._index._spaces) == 1


def test_the_order_of_eviction_does_not_cost_more_and_more_memory():
    worker = Worker(num_pages=9)
    worker.run(A)
    for _ in range(2000):
        worker.cached(A)
    assert len(worker.kv._index._idle) < 200


def test_what_was_used_again_since_it_came_to_rest_is_young():
    worker = Worker(num_pages=4)
    prompts = [[n] * 4 for n in (1, 2, 3)]
    for ids in prompts:
        worker.run(ids)
    assert worker.cached(prompts[0]) == 4, "used again"
    assert worker.kv.allocate(1) is not None
    assert [worker.cached(ids) for ids in prompts] == [4, 0, 4]


def test_a_prefix_that_goes_takes_what_hangs_below_it_out_of_the_index():
    worker = Worker(num_pages=4)
    kv = worker.kv
    first, second = kv.allocate(1), kv.allocate(2)
    assert first is not None and second is not None
    kv.publish(NS, worker.hashes(A[:4]), first, 4)
    kv.publish(NS, worker.hashes(A[:8]), second, 8)  # its first page stays private
    kv.release(first)
    assert kv.allocate(1) == first, "the idle root, although its child is held"
    kv.check()
    assert worker.cached(A[:8]) == 0
    kv.release(second)
    assert kv.counts().free == 2


def test_an_allocation_that_waits_for_poison_of_another_thread_gives_everything_back():
    worker = Worker(num_pages=4)
    kv = worker.kv
    worker.run(A[:4])
    pages = kv.allocate(1)
    assert pages is not None
    inside, go_on = threading.Event(), threading.Event()

    def fill(filled):
        if filled == pages:
            inside.set()
            assert go_on.wait(10)

    kv.set_poison(fill)
    releasing = threading.Thread(target=kv.release, args=(pages,))
    releasing.start()
    assert inside.wait(10)
    assert kv.available() == 3
    assert kv.allocate(3) is None
    assert kv.counts().held == 0
    go_on.set()
    releasing.join(10)
    kv.check()
    assert kv.allocate(3) is not None
