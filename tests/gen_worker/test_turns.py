"""Back-flow at gen: a finished sample's full blocks are published, under the names of the next turn, and offered."""

from __future__ import annotations

from dataclasses import replace

from gen_fakes import Gen
from loop_fakes import EOS, HASHER, SPACE, prompt_of

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import Fidelity
from tailrace.transfer.loop_events import Admitted

BLOCK = 4


def admit(gen: Gen, name: str, prompt: list[int], ctx: str = "ctx-boot", **options) -> tuple[str, int]:
    """As Gen.admit, with the scope and the ctx that a real hand-off carries."""
    key = gen.admit(name, prompt, **options)
    event = gen.node.events.pop()
    assert isinstance(event, Admitted)
    gen.node.events.append(replace(event, ctx=ctx, handoff=replace(event.handoff, scope="scope")))
    return key


def whole(gen: Gen, key: tuple[str, int], prompt: list[int]) -> list[int]:
    """Prompt and all output, the first token included."""
    return [*prompt, gen.handoffs[key].first_tokens[0], *gen.node.output(key)]


def found(gen: Gen, ids: list[int]) -> int:
    hit = gen.kv.match_prefix(SPACE, HASHER.hash_blocks("scope", ids), len(ids))
    gen.kv.release(hit.pages)
    return hit.num_tokens


def test_a_finished_turn_is_found_by_the_next_and_offered_with_its_generations():
    gen = Gen(hasher=HASHER)
    prompt = prompt_of(10, 1)
    key = admit(gen, "r", prompt, max_tokens=9)
    gen.drain()
    ids = whole(gen, key, prompt)  # 19, and the last one's state was never computed
    assert found(gen, [*ids, 5, 6]) == 16
    (turn,) = gen.node.turns
    assert (turn.key, turn.ctx, turn.namespace, turn.num_tokens) == (key, "ctx-boot", SPACE, 16)
    assert turn.hashes == HASHER.hash_blocks("scope", ids[:16])
    assert [page.ordinal for page in turn.pages] == [0, 1, 2, 3]
    assert all(gen.kv.descriptor_generation(page.page) == page.generation for page in turn.pages)
    size = gen.kv.layout.tokens_per_page
    held = [int(gen.engine.memory[page.page, i]) for page in turn.pages for i in range(size)]
    assert held == ids[:16]
    gen.assert_quiet()


def test_a_pass_that_is_still_in_flight_has_computed_nothing_of_a_turn():
    """The prompt's 10 and 6 drawn tokens fill four blocks, but the pass in flight makes the last one's state."""
    gen = Gen(hasher=HASHER, ahead=True)
    prompt = prompt_of(10, 1)
    key = admit(gen, "r", prompt, max_tokens=30)
    gen.engine.forced[15] = EOS
    gen.drain()
    ids = whole(gen, key, prompt)
    assert len(ids) == 16 and ids[-1] == EOS and gen.engine.launches > len(gen.node.output(key)), (
        "one was launched more"
    )
    (turn,) = gen.node.turns
    assert turn.num_tokens == 12 and found(gen, [*ids, 5, 6]) == 12
    gen.assert_quiet()


def test_the_tail_of_a_prompt_is_enough_to_name_what_follows_it():
    gen = Gen(hasher=HASHER)
    prompt = prompt_of(14, 2)
    key = admit(gen, "r", prompt, max_tokens=9, tail=BLOCK)
    gen.drain()
    (turn,) = gen.node.turns
    assert turn.hashes == HASHER.hash_blocks("scope", whole(gen, key, prompt)[:20])


def test_without_a_new_block_or_a_ctx_nothing_is_offered():
    gen = Gen(hasher=HASHER)
    admit(gen, "short", prompt_of(9, 3), max_tokens=2)
    alone = admit(gen, "local", prompt_of(9, 4), max_tokens=12, ctx="")
    gen.drain()
    assert gen.node.turns == []
    assert found(gen, [*whole(gen, alone, prompt_of(9, 4)), 5]) == 20


def test_nothing_is_published_unless_it_is_configured():
    gen = Gen()
    prompt = prompt_of(10, 1)
    key = admit(gen, "r", prompt, max_tokens=9)
    gen.drain()
    assert gen.node.turns == [] and found(gen, whole(gen, key, prompt)) == 8


def test_what_a_window_has_left_behind_is_not_offered():
    gen = Gen(hasher=HASHER, window=4)
    key = admit(gen, "r", prompt_of(10, 1), max_tokens=12)
    assert SCRATCH_PAGE in gen.node.events[-1].pages
    gen.drain()
    assert gen.node.turns == [] and gen.node.ends[key] == "finished"


def test_what_a_lossy_step_made_is_not_offered():
    gen = Gen(hasher=HASHER)
    admit(gen, "r", prompt_of(10, 1), max_tokens=9)
    gen.node.events[-1] = replace(gen.node.events[-1], fidelity=Fidelity.of(4, ["int8"]))
    gen.drain()
    assert gen.node.turns == []


def test_each_sample_of_a_request_is_a_turn_of_its_own():
    gen = Gen(hasher=HASHER)
    admit(gen, "r", prompt_of(10, 1), max_tokens=9, samples=2)
    gen.drain()
    assert len(gen.node.turns) == 2 and len({turn.hashes for turn in gen.node.turns}) == 2
    gen.assert_quiet()


def test_a_cancelled_request_leaves_no_turn():
    gen = Gen(hasher=HASHER)
    key = admit(gen, "r", prompt_of(10, 1), max_tokens=50)
    for _ in range(12):
        gen.loop.run_pass()
    gen.cancel(key)
    gen.drain()
    assert gen.node.turns == []
    gen.assert_quiet()
