"""Fidelity classes in the prefix index: a lossy page is found by those who asked for such, and by nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kv_cache.block_hash import BlockHasher, lossy_namespace, namespace
from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import EXACT, Fidelity, KvManager
from tailrace.model.state_groups import Field, GroupKind, StateGroup

GROUP = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 4), Field("v", 1, 4)))
NS = namespace("rev|x", "bfloat16/exact")
A = list(range(16))  # 4 pages of 4 tokens


class Gen:
    """A worker's books; requests that read what they lack through a codec."""

    def __init__(self, page: int = 4, block: int = 4, num_pages: int = 33) -> None:
        self.kv = KvManager(single_layout([GROUP], page, "bfloat16"), num_pages, block)
        self.hasher = BlockHasher(b"s", block)

    def serve(self, ids: list[int], steps: tuple[str, ...] = (), read: str = "") -> Fidelity:
        """Bind, read what is missing through `read` (empty: exactly), publish, let go."""
        hashes = self.hasher.hash_blocks("x", ids)
        hit = self.kv.match_prefix(NS, hashes, len(ids), whole=True, steps=steps)
        missing = self.kv.layout.num_pages(len(ids)) - len(hit.pages)
        fidelity = hit.fidelity
        if missing and read:
            exact = hit.num_tokens if fidelity.exact_tokens is None else fidelity.exact_tokens
            fidelity = Fidelity.of(exact, [fidelity.step, read] if fidelity.step else [read])
        new = self.kv.allocate(missing)
        assert new is not None
        self.kv.publish(NS, hashes, hit.pages + new, len(ids), fidelity)
        self.kv.release(hit.pages + new)
        self.kv.check()
        return fidelity

    def found(self, ids: list[int], *steps: str) -> int:
        hit = self.kv.match_prefix(NS, self.hasher.hash_blocks("x", ids), len(ids), whole=True, steps=steps)
        self.kv.release(hit.pages)
        return hit.num_tokens


def test_a_lossy_page_is_found_by_its_own_step_only():
    gen = Gen()
    gen.serve(A, ("int8",), read="int8")
    assert gen.found(A, "int8") == 16
    assert gen.found(A) == 0, "an exact request must not see it"
    assert gen.found(A, "int4") == 0


def test_exact_and_lossless_pages_share_one_class_and_serve_lossy_requests_too():
    gen = Gen()
    gen.serve(A, read="")  # raw and lossless both leave no step
    assert gen.found(A) == gen.found(A, "int8") == 16
    hit = gen.kv.match_prefix(NS, gen.hasher.hash_blocks("x", A), 16, whole=True, steps=("int8",))
    assert hit.fidelity == EXACT
    gen.kv.release(hit.pages)


def test_a_request_takes_exact_pages_first_and_lossy_ones_behind_them():
    gen = Gen()
    gen.serve(A[:8])
    assert gen.serve(A, ("int8",), read="int8") == Fidelity(8, "int8")
    assert gen.found(A, "int8") == 16
    assert gen.found(A) == 8
    assert gen.kv.counts().cached == 4, "the exact pages were used, not copied"


def test_what_is_read_exactly_behind_a_lossy_prefix_counts_as_lossy():
    gen = Gen()
    gen.serve(A[:8], ("int8",), read="int8")
    assert gen.serve(A, ("int8",), read="") == Fidelity(0, "int8")
    assert gen.found(A) == 0
    assert gen.found(A, "int8") == 16


def test_an_exact_copy_stands_beside_the_lossy_one_and_is_preferred():
    gen = Gen()
    gen.serve(A, ("int8",), read="int8")
    gen.serve(A)
    assert gen.found(A) == 16
    assert gen.kv.counts().cached == 8
    assert gen.serve(A, ("int8",)) == EXACT


def test_pages_of_two_steps_hang_together_and_the_lossier_names_the_rest():
    gen = Gen()
    gen.serve(A[:8], ("int8", "int4"), read="int8")
    assert gen.serve(A, ("int8", "int4"), read="int4") == Fidelity(0, "int4")
    assert gen.found(A, "int8", "int4") == 16
    assert gen.found(A, "int8") == 8
    assert gen.found(A, "int4") == 0, "its beginning came through int8 alone"


def test_a_granule_of_which_half_is_exact_is_lossy():
    gen = Gen(page=4, block=8)
    hashes = gen.hasher.hash_blocks("x", A)
    pages = gen.kv.allocate(4)
    assert pages is not None
    gen.kv.publish(NS, hashes, pages, 16, Fidelity(12, "int8"))
    assert gen.found(A) == 8
    assert gen.found(A, "int8") == 16
    gen.kv.release(pages)


def test_an_exact_prefix_that_is_evicted_takes_the_lossy_pages_behind_it_along():
    gen = Gen(num_pages=5)
    gen.serve(A[:8])
    gen.serve(A, ("int8",), read="int8")
    pages = gen.kv.allocate(4)
    assert pages is not None and gen.found(A, "int8") == 0
    gen.kv.release(pages)
    gen.kv.check()


def test_namespaces_differ_by_step_and_by_the_exact_one_they_stand_beside():
    spaces = {
        NS,
        lossy_namespace(NS, "int8"),
        lossy_namespace(NS, "int4"),
        lossy_namespace(namespace("y", "f"), "int8"),
    }
    assert len(spaces) == 4
    with pytest.raises(ValueError, match="names the step"):
        lossy_namespace(NS, "")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5), st.integers(1, 8), st.sampled_from([(), ("int8",), ("int8", "int4")]), st.booleans()
        ),
        max_size=25,
    )
)
def test_an_exact_request_never_holds_a_page_that_a_lossy_step_made(requests):
    """Prompts that share prefixes, in a pool that evicts; who made each page is written down beside the books."""
    gen = Gen(num_pages=12)
    exact: dict[int, bool] = {}
    for fork, pages, steps, through_codec in requests:
        ids = [*A[: 4 * min(fork, pages)], *range(100 * fork, 100 * fork + 4 * max(0, pages - fork))]
        hashes = gen.hasher.hash_blocks("x", ids)
        hit = gen.kv.match_prefix(NS, hashes, len(ids), whole=True, steps=steps)
        if not steps:
            assert all(exact[page] for page in hit.pages)
        truly = [exact[page] for page in hit.pages]
        assert hit.fidelity.is_exact == all(truly)
        new = gen.kv.allocate(gen.kv.layout.num_pages(len(ids)) - len(hit.pages))
        if new is not None:
            read = steps[-1] if steps and through_codec and new else ""
            fidelity = hit.fidelity
            if read:
                first = hit.num_tokens if fidelity.exact_tokens is None else fidelity.exact_tokens
                fidelity = Fidelity.of(first, [read])
            exact.update(dict.fromkeys(new, fidelity.is_exact))
            gen.kv.publish(NS, hashes, hit.pages + new, len(ids), fidelity)
        gen.kv.release(hit.pages + (new or []))
        gen.kv.check()
