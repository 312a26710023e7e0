"""Replay: upper windows made anew from a prompt's end; exact from the computed length on, ever closer below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa2_config import parse_config
from tailrace.model.errors import ConfigError
from tailrace.model.replay import rebuild, resume
from tailrace.model.replay_policy import ReplayPolicy, bounded_replay, exact_replay
from tests.model.csa2_models import ENGRAM, Pages, make_decoder, random_ids, run
from tests.model.published import V41_FLASH, published_config

PROMPT, DECODED = 200, 20


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Scene:
    """A prompt of which all is known, and a sequence that holds the lower half of it."""

    def __init__(self) -> None:
        self.decoder = make_decoder(ENGRAM, seed=2)
        self.config = self.decoder.config
        self.pages = Pages(self.decoder, 1200)
        self.ids = random_ids(PROMPT + DECODED, seed=4)
        self.whole = run(self.pages, self.pages.table(len(self.ids)), self.ids)

    def lower_half(self, num_tokens: int) -> np.ndarray:
        table = self.pages.table(len(self.ids))
        run(self.pages, table, self.ids[:num_tokens], cuts=[64], num_layers=self.config.boundary)
        return table

    def later(self, table: np.ndarray) -> float:
        """Largest error of the tokens behind the prompt."""
        found = run(self.pages, table, self.ids[PROMPT:], PROMPT, cuts=[PROMPT + 1])
        return float((found - self.whole[PROMPT:]).abs().max())

    def error(self, hidden: torch.Tensor) -> float:
        """Of the token behind the prompt."""
        return float((self.decoder.logits(hidden[-1:]) - self.whole[PROMPT - 1]).abs().max())

    def resumed(self, num_tokens: int, cuts: Sequence[int] = ()) -> tuple[float, float]:
        start = PROMPT - num_tokens
        table = self.lower_half(start)
        hidden = torch.empty(0)
        for end in (*(start + cut for cut in cuts), PROMPT):
            ids, positions = torch.tensor(self.ids[start:end]), torch.arange(start, end)
            span = RowSpan(start, end - start, table)
            hidden = resume(self.decoder, ids, positions, self.pages.pool, [span], [PROMPT - num_tokens])
            start = end
        return self.error(hidden), self.later(table)

    def rebuilt(self, policy: ReplayPolicy) -> tuple[float, float]:
        table = self.lower_half(PROMPT)
        tail = self.ids[:PROMPT][-policy.tail_tokens(self.config) :]
        hidden = rebuild(self.decoder, tail, PROMPT, self.pages.pool, table, policy)
        assert len(hidden) == min(policy.decoder, PROMPT)
        return self.error(hidden), self.later(table)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


def test_the_exact_lengths_follow_from_layers_and_window():
    config = parse_config(published_config(V41_FLASH), "config.json")
    assert exact_replay(config) == ReplayPolicy(2541, 2541 + 20 * 127)
    assert bounded_replay(config) == ReplayPolicy(256, 256)
    assert ReplayPolicy(256, 512).tail_tokens(config) == 515


def test_resumed_at_the_exact_length_all_is_exact(scene: Scene):
    exact = exact_replay(scene.config).decoder
    assert exact == 5 * 15 + 1
    assert scene.resumed(exact) == (0, 0)
    assert scene.resumed(exact, cuts=[1, 20, 21, 70]) == (0, 0)


def test_rebuilt_at_the_exact_length_all_is_exact(scene: Scene):
    assert scene.rebuilt(exact_replay(scene.config)) == (0, 0)
    assert scene.rebuilt(ReplayPolicy(PROMPT + 50, PROMPT + 50)) == (0, 0)


def test_the_error_falls_with_the_length(scene: Scene):
    """Of the first token and of all later ones; a window too short is off by enough to be seen."""
    lengths = (16, 32, 64)
    resumed = [max(scene.resumed(n)) for n in lengths]
    rebuilt = [max(scene.rebuilt(ReplayPolicy(n, n))) for n in lengths]
    for errors in (resumed, rebuilt):
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 1e-2
    assert resumed[-1] < 1e-2
    assert all(a <= b for a, b in zip(resumed, rebuilt, strict=True))
    # With the lower half replayed to its exact length, rebuilding is as good as resuming.
    lower = scene.config.boundary * (scene.config.window - 1)
    assert scene.rebuilt(ReplayPolicy(32, 32 + lower)) == scene.resumed(32)


def test_rebuilding_writes_upper_windows_and_nothing_else(scene: Scene):
    table = scene.lower_half(PROMPT)
    before = scene.pages.pool.pages.clone()
    policy = bounded_replay(scene.config)
    tail = scene.ids[:PROMPT][-policy.tail_tokens(scene.config) :]
    rebuild(scene.decoder, tail, PROMPT, scene.pages.pool, table, policy)
    after = scene.pages.pool.pages.clone()
    rows = scene.pages.pool.of(table)
    for layer in range(scene.config.boundary, scene.config.num_layers):  # put back what it may have changed
        state = rows.state("window", layer)
        index = torch.arange(state.rows)
        assert not (state.read(index) == 0xFF).all(1).any()
        state.write(index, torch.full((state.rows, state.row_bytes), 0xFF, dtype=torch.uint8))
    assert torch.equal(scene.pages.pool.pages, before)
    scene.pages.pool.pages.copy_(after)


def test_all_windows_are_made_where_only_rows_that_grow_are_known(scene: Scene):
    full = scene.pages.table(len(scene.ids))
    run(scene.pages, full, scene.ids[:PROMPT])
    table = scene.pages.table(len(scene.ids))
    history = len(table) - scene.decoder.layout.num_state_pages
    scene.pages.pool.pages[table[:history]] = scene.pages.pool.pages[full[:history]]
    policy = exact_replay(scene.config)
    tail = scene.ids[:PROMPT][-policy.tail_tokens(scene.config) :]
    hidden = rebuild(scene.decoder, tail, PROMPT, scene.pages.pool, table, policy, only_history=True)
    assert (scene.error(hidden), scene.later(table)) == (0, 0)
    with pytest.raises(ValueError, match="after 199 tokens a tail is open"):
        rebuild(scene.decoder, tail, 199, scene.pages.pool, table, policy, only_history=True)


def test_what_is_kept_of_the_lower_half_is_used(scene: Scene):
    """The last token sees kept rows only: what it brings to the boundary is exact, however little is replayed."""
    last = torch.tensor([(PROMPT - 1) % 16])
    found = []
    for whole in (True, False):
        table = scene.lower_half(PROMPT)
        if whole:
            table = scene.pages.table(len(scene.ids))
            run(scene.pages, table, scene.ids[:PROMPT])
        else:
            tail = scene.ids[PROMPT - 19 : PROMPT]
            rebuild(scene.decoder, tail, PROMPT, scene.pages.pool, table, ReplayPolicy(16, 16))
        found.append(scene.pages.pool.of(table).state("window", scene.config.boundary).read(last))
    assert torch.equal(*found)


def test_sequences_resume_side_by_side_with_others(scene: Scene):
    n = 32
    tables = [scene.lower_half(PROMPT - n), scene.lower_half(PROMPT - n), scene.pages.table(40)]
    some = random_ids(10, seed=9)
    ids = torch.tensor([*scene.ids[PROMPT - n : PROMPT], *some, *scene.ids[PROMPT - n : PROMPT]])
    there = torch.arange(PROMPT - n, PROMPT)
    positions = torch.cat((there, torch.arange(10), there))
    spans = [RowSpan(PROMPT - n, n, tables[0]), RowSpan(0, 10, tables[2]), RowSpan(PROMPT - n, n, tables[1])]
    hidden = resume(scene.decoder, ids, positions, scene.pages.pool, spans, [PROMPT - n, 0, PROMPT - n])
    assert torch.equal(hidden[:n], hidden[-n:])
    alone = run(scene.pages, scene.pages.table(40), some)
    assert torch.equal(scene.decoder.logits(hidden[n : n + 10]), alone)
    assert (scene.error(hidden), scene.later(tables[1])) == scene.resumed(n)


def test_a_policy_says_what_it_costs_and_is_refused_if_it_makes_no_window(scene: Scene):
    exact = exact_replay(scene.config)
    assert exact.step(scene.config, resumed=True) == exact.step(scene.config, resumed=False) == ""
    assert ReplayPolicy(exact.decoder, exact.decoder).step(scene.config, resumed=True) == ""
    assert ReplayPolicy(exact.decoder, exact.decoder).step(scene.config, resumed=False) == "replay-76-76"
    assert ReplayPolicy(32, 48).step(scene.config, resumed=True) == "replay-32"
    for decoder, encoder in ((0, 5), (6, 5)):
        with pytest.raises(ConfigError, match="expected 1 <= decoder <= encoder"):
            ReplayPolicy(decoder, encoder)
    with pytest.raises(ConfigError, match="decoder is 15 tokens, fewer than a window of 16"):
        scene.rebuilt(ReplayPolicy(15, 40))
    with pytest.raises(ValueError, match="last 35 ids, not 34"):
        rebuild(scene.decoder, scene.ids[:34], PROMPT, scene.pages.pool, scene.pages.table(220), ReplayPolicy(32, 32))


def test_one_step_holds_rows_that_stop_below_rows_that_resume_and_others(scene: Scene):
    """What a worker's pass is made of: `upper_from` alone says how far each row goes."""
    n, pool = 64, scene.pages.pool
    start = PROMPT - n
    lower, table, other = scene.pages.table(len(scene.ids)), scene.lower_half(start), scene.pages.table(40)
    some = random_ids(10, seed=9)
    ids = torch.tensor([*scene.ids[:start], *scene.ids[start:PROMPT], *some])
    positions = torch.cat((torch.arange(PROMPT), torch.arange(10)))
    spans = [
        RowSpan(0, start, lower, upper_from=start),
        RowSpan(start, n, table, upper_from=start),
        RowSpan(0, 10, other),
    ]
    hidden = scene.decoder.forward(ids, positions, pool, spans)
    assert torch.equal(scene.decoder.logits(hidden[PROMPT:]), run(scene.pages, scene.pages.table(40), some))
    assert (scene.error(hidden[start:PROMPT]), scene.later(table)) == scene.resumed(n)
    span = RowSpan(start, n, lower, upper_from=start)  # the row that stopped is what `lower_half` makes
    hidden = scene.decoder.forward(ids[start:PROMPT], positions[start:PROMPT], pool, [span])
    assert (scene.error(hidden), scene.later(lower)) == scene.resumed(n)
    with pytest.raises(ValueError, match="upper layers begin at 150, within the 64 at 136"):
        scene.decoder.forward(ids[start:PROMPT], positions[start:PROMPT], pool, [RowSpan(start, n, lower, 0, 150)])
