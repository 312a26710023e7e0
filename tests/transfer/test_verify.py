"""verify_pages: both cores in simulated time (handoff_sim), with contents that change where they should not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff_sim import CONFIG, PAGE, World, prompt

from tailrace.transfer import core_events as ce
from tailrace.transfer.bitmap import Unit
from tailrace.transfer.messages import Mistrust, PageDescriptor, Sums, Want, WantSums
from tailrace.transfer.verify import PageProofs, Proof

CORRUPT = ce.Metric.CORRUPT_PAGES
BOTH = pytest.mark.parametrize("landing", [False, True], ids=["reading", "landing"])
VERIFY = replace(CONFIG, verify_pages=True)


def world(landing: bool = False, **options) -> World:
    return World(landing=landing, **{"config": VERIFY, **options})


def sent(w: World, kind: type) -> list:
    return [frame for _, _, frame in w.frames if isinstance(frame, kind)]


def spoil_at_gen(w: World, ordinal: int, times: int = 1) -> None:
    """The next copies of this page put other bytes into gen's pages."""
    left = [times]

    def spoil(worker, copied, page):
        if copied == ordinal and left[0]:
            left[0] -= 1
            worker.memory[page] = "flipped"

    w.spoil = spoil


def finished(request, attempts: int = 1) -> None:
    assert (request.outcome, request.attempt) == ("finished", attempts - 1)


@BOTH
def test_pages_with_equal_sums_are_decoded_and_each_is_summed_once_at_ctx(landing):
    w = world(landing)
    for n in (1, PAGE, 9, 40):
        finished_later = w.submit(f"r{n}", prompt(1, n, n))
        w.run(3)
        finished(finished_later)
    assert w.workers["g0"].measures[CORRUPT] == 0
    told = [page for frame in sent(w, Sums) for page in frame.pages]
    assert len({(p.page, p.generation) for p in told}) == len(told)
    w.assert_quiet()


@BOTH
def test_nothing_is_asked_or_summed_unless_it_is_configured(landing):
    w = world(landing, config=CONFIG)
    w.submit("r", prompt(0, 22))
    w.run(2)
    assert not sent(w, WantSums) and not sent(w, Sums)


@BOTH
def test_a_page_that_is_wrong_at_gen_once_is_brought_over_again(landing):
    w = world(landing)
    spoil_at_gen(w, 2)
    request = w.submit("r", prompt(0, 22))
    w.run(3)
    finished(request)
    assert w.workers["g0"].measures[CORRUPT] == 1
    assert [m.again for m in sent(w, Mistrust)] == ([True] if landing else [])
    w.assert_quiet()


@BOTH
def test_without_verification_the_same_flip_would_be_decoded(landing):
    w = world(landing, config=CONFIG)
    spoil_at_gen(w, 2)
    w.submit("r", prompt(0, 22))
    with pytest.raises(AssertionError, match="wrong state"):
        w.run(3)


@BOTH
def test_a_page_that_changes_at_ctx_is_computed_anew_and_given_to_nobody(landing):
    """Its first rereading is as wrong; the second attempt must not find it in ctx's prefix index."""
    w = world(landing)
    w.held = True
    request = w.submit("r", prompt(3, 22))
    w.run(0.4)
    ctx = w.workers["c0"]
    page = ctx.core._attempts["r", 0].pages[1].page
    ctx.memory[page] = "flipped"
    w.held = False
    w.run(3)
    finished(request, attempts=2)
    assert w.workers["g0"].measures[CORRUPT] == 2
    assert sent(w, Mistrust)[-1].again is False and sent(w, Mistrust)[-1].ordinals == ((0, 1, 2),)
    second = w.submit("s", prompt(3, 22, 1))
    w.run(3)
    finished(second)
    w.assert_quiet()


def test_what_changes_between_two_prompts_of_one_prefix_is_found():
    """The sums are those of when the page became final, not of when the second prompt found it."""
    w = world(num_gen=2)
    first = w.submit("a0", prompt(4, 22))
    w.run(3)
    finished(first)
    ctx = w.workers["c0"]
    gen_of_first = first.gen
    hit = ctx.kv.match_prefix(b"n" * 16, w.hasher.hash_blocks("s", first.tokens), 22)
    ctx.memory[hit.pages[0]] = "flipped"
    ctx.kv.release(hit.pages)
    second = next(
        r
        for r in (w.submit(f"b{i}", prompt(4, 22, i)) for i in range(1, 9))
        if w.run(3) is None and r.gen != gen_of_first
    )
    finished(second, attempts=2)
    w.assert_quiet()


@BOTH
def test_by_policy_fail_the_client_gets_an_error_and_no_token_of_gen(landing):
    w = world(landing, config=replace(VERIFY, retry_failed_transfers=False))
    spoil_at_gen(w, 2, times=2)
    request = w.submit("r", prompt(0, 22))
    w.run(3)
    assert (request.outcome, request.reason) == ("failed", "corrupt")
    assert not w.workers["g0"].admitted
    w.assert_quiet()


@BOTH
def test_a_corrupt_landing_chunk_is_posted_once_more(landing):
    """Also behind a lossy codec, where the chunk's checksum is all there is."""
    w = world(landing)
    w.read_errors = ["corrupt"]
    request = w.submit("r", prompt(0, 22))
    w.run(3)
    finished(request)
    assert w.workers["g0"].measures[CORRUPT] == 1


def test_sums_that_are_lost_with_the_link_are_asked_for_again():
    w = world()
    request = w.submit("r", prompt(0, 22))
    w.run(0.14)
    w.break_link("c0.1", w.workers["g0"], 0.2)
    w.run(4)
    finished(request)
    w.assert_quiet()


@BOTH
@pytest.mark.parametrize("when", [x / 100 for x in range(4, 40, 3)])
def test_an_abort_at_any_moment_leaves_nothing(landing, when):
    w = world(landing)
    spoil_at_gen(w, 1)
    w.submit("r", prompt(0, 22))
    w.run(when)
    w.cancel("r")
    w.run(3)
    w.assert_quiet()


def test_a_hand_off_whose_ctx_died_decodes_if_its_sums_were_here_and_is_placed_anew_if_not():
    for sum_s, attempts in ((0.004, 1), (5.0, 2)):
        w = world(num_ctx=2)
        w.sum_s, w.read_s = sum_s, 0.4
        request = w.submit("r", prompt(0, 22))
        w.run(0.25)
        w.kill(next(name for name, worker in w.workers.items() if worker.boot == request.ctx))
        w.sum_s = 0.004
        w.run(6)
        finished(request, attempts)
        w.assert_quiet()


def test_a_lossy_pair_is_proven_by_its_copies():
    proofs, proof = PageProofs(), Proof(exact=False, first_token=0)
    page = PageDescriptor(0, 1, 7, 3)
    assert proofs.ask(("r", 0), proof, [Unit(0, 1)]) == []
    assert proofs.copied(proof, [page]) == (page,)
    assert proofs.check(("r", 0), proof, lambda unit: ()) == []


def test_rows_before_the_first_missing_token_are_not_summed():
    w = world()
    w.held = True
    request = w.submit("r", prompt(0, 22))
    w.run(0.3)
    core = w.workers["c0"].core
    attempt = core._attempts[request.key]
    actions = core.handle(ce.FromPeer(attempt.reader.boot, WantSums("r", 0, PAGE + 3, ((0, 1, 2),))), w.now)
    (job,) = [a.job for a in actions if isinstance(a, ce.StartSums)]
    assert job.parts == ((ce.SumPart(attempt.pages[1].page, 3, PAGE - 3, 3),),)
    assert sent(w, Want)
