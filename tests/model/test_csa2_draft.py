"""DSpark: what is proposed changes how many steps it takes and never what comes out, nor the state that is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from tailrace.kernels.hyper_connections import collapse, spread
from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa2_blocks import attended, experts, mix, queries, window_keys
from tailrace.model.csa2_config import parse_config
from tailrace.model.errors import ConfigError
from tailrace.model.replay import rebuild
from tailrace.model.replay_policy import exact_replay
from tailrace.model.row_groups import RowPages
from tests.model.csa2_models import DRAFT, ENGRAM, Pages, make_decoder, random_ids, random_tensors, run, step
from tests.model.published import V41_FLASH, published_config

PROMPT, TOKENS, BLOCK = 79, 18, 5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pages() -> Pages:
    return Pages(make_decoder(DRAFT, seed=1), 600)


class Plain:
    """Greedy decoding token by token: ids of prompt and answer, and the pages it leaves."""

    def __init__(self, pages: Pages, seed: int) -> None:
        self.ids = random_ids(PROMPT, seed)
        self.table = pages.table(PROMPT + TOKENS + BLOCK)
        logits = run(pages, self.table, self.ids)[-1]
        for at in range(PROMPT, PROMPT + TOKENS):
            self.ids.append(int(logits.argmax()))
            logits = step(pages, [(self.table, self.ids[at:], at)])[-1]
        self.answer = self.ids[PROMPT:]


@pytest.fixture(scope="module")
def plain(pages: Pages) -> list[Plain]:
    return [Plain(pages, seed) for seed in (7, 8)]


def rows_left(pages: Pages, table: np.ndarray, num_tokens: int) -> dict[tuple[str, int], torch.Tensor]:
    """All that exists after so many tokens."""
    layout, rows = pages.decoder.layout, pages.pool.of(table)
    left = {}
    for (name, layer), region in layout.history.items():
        left[name, layer] = rows.history(name, layer).first(num_tokens * region.rows_per_page // layout.tokens_per_page)
    for (name, layer), region in layout.state.items():
        if not name.startswith("pending") or layout.is_open(num_tokens):
            left[name, layer] = rows.state(name, layer).read(torch.arange(region.rows))
    return left


def decode(pages: Pages, want: Sequence[Plain], propose) -> int:
    """Decode side by side with proposals, compare tokens and state -> number of steps."""
    decoder, steps = pages.decoder, 0
    tables = [pages.table(PROMPT + TOKENS + BLOCK) for _ in want]
    out = [[int(run(pages, t, w.ids[:PROMPT])[-1].argmax())] for t, w in zip(tables, want, strict=True)]
    while any(len(some) <= TOKENS for some in out):
        live = [i for i, some in enumerate(out) if len(some) <= TOKENS]
        lengths = [PROMPT + len(out[i]) - 1 for i in live]
        some = propose([out[i][-1] for i in live], lengths, [tables[i] for i in live], live)
        proposed = [[out[i][-1], *p][: TOKENS + 1 - len(out[i]) + 1] for i, p in zip(live, some, strict=True)]
        spans = [RowSpan(n, len(p), tables[i]) for i, n, p in zip(live, lengths, proposed, strict=True)]
        for i, more in zip(live, decoder.verify(proposed, pages.pool, spans), strict=True):
            out[i] += more
        steps += 1
    for table, mine, w in zip(tables, out, want, strict=True):
        assert mine[:TOKENS] == w.answer
        assert len(mine) == TOKENS + 1
        found, expected = rows_left(pages, table, PROMPT + TOKENS), rows_left(pages, w.table, PROMPT + TOKENS)
        assert all(torch.equal(found[key], expected[key]) for key in expected), [
            key for key in expected if not torch.equal(found[key], expected[key])
        ]
    return steps


def test_drafted_output_equals_plain_greedy_decoding(pages: Pages, plain: list[Plain]):
    draft = pages.decoder.draft
    assert draft is not None

    def propose(anchors, lengths, tables, live):
        return draft.propose(anchors, lengths, [pages.pool.of(table) for table in tables]).ids.tolist()

    assert decode(pages, plain, propose) <= TOKENS


def test_good_proposals_save_steps_and_bad_ones_change_nothing(pages: Pages, plain: list[Plain]):
    """What plain decoding gave, with some tokens wrong; of random length, also none."""
    rng = np.random.default_rng(0)

    def propose(anchors, lengths, tables, live):
        some = []
        for n, i in zip(lengths, live, strict=True):
            right = plain[i].ids[n + 1 : n + 1 + int(rng.integers(0, BLOCK + 1))]
            some.append([token if rng.random() < 0.8 else (token + 1) % 97 for token in right])
        return some

    assert decode(pages, plain[:1], propose) < TOKENS * 0.75


def test_seeded_sampling_is_verified_by_the_same_draws(pages: Pages):
    """What is chosen is a function of position, so proposals are held against it and change nothing."""

    def choose(logits: torch.Tensor, position: int) -> list[int]:
        """Gumbel noise by position, as the sampler's counters give it."""
        out = []
        for i, row in enumerate(logits):
            noise = torch.rand(len(row), generator=torch.Generator().manual_seed(1000 + position + i))
            out.append(int((row - (-noise.log()).log()).argmax()))
        return out

    ids = random_ids(30, seed=5)
    plain_table, table = pages.table(60), pages.table(60)
    for one in (plain_table, table):
        run(pages, one, ids[:29])
    answer = [ids[29]]
    while len(answer) < 16:
        at = 28 + len(answer)
        answer += pages.decoder.verify([answer[-1:]], pages.pool, [RowSpan(at, 1, plain_table)], choose)[0]
    out, steps = [ids[29]], 0
    while len(out) < 16:
        right = answer[len(out) : len(out) + 3]
        proposed = [out[-1], *(right if steps % 2 else [*right[:1], 0, 1])]
        span = RowSpan(28 + len(out), len(proposed), table)
        out += pages.decoder.verify([proposed], pages.pool, [span], choose)[0]
        steps += 1
    assert out[:16] == answer[:16]
    assert len(set(answer)) > 8
    assert steps < 8


def test_a_blocks_logits_are_those_of_the_stages_written_out(pages: Pages):
    """One sequence, without pages: keys from all of its context, dense attention."""
    decoder, ids = pages.decoder, random_ids(30, seed=2)
    config, draft = decoder.config, decoder.draft
    assert draft is not None
    w, embed = draft._weights, draft._all.embed
    table = pages.table(40)
    seen: dict[int, torch.Tensor] = {}
    original = draft.remember
    draft.remember = lambda incoming, positions, parts: (seen.update(incoming), original(incoming, positions, parts))  # type: ignore[method-assign]
    try:
        run(pages, table, ids)
    finally:
        del draft.remember  # type: ignore[method-assign]
    proposal = draft.propose([11], [30], [pages.pool.of(table)])
    turn = draft_turns(draft, torch.arange(35))
    context = w.context_norm(torch.cat([seen[i] for i in (5, 7, 8)], 1) @ w.context.T)
    block = torch.tensor([11, 95, 95, 95, 95])
    streams = embed[block][:, None].expand(-1, 4, -1)
    pre = torch.tensor([[1.0, 0, 0, 0]]).expand(5, -1)
    for stage in w.stages:
        m = mix(streams, stage.attn_mixing, config)
        x = stage.attn_norm(collapse(streams, pre))
        q = queries(x, stage, turn[:, 30:], config)[1]
        old = window_keys(context, stage, turn[:, :30])[14:].bfloat16().float()
        keys = torch.cat((old, window_keys(x, stage, turn[:, 30:])))
        logits = torch.cat((q @ keys.T * 64**-0.5, stage.sink[None, :, None].expand(5, -1, 1)), -1)
        out = logits.softmax(-1)[..., :-1] @ keys
        streams = spread(streams, attended(out, stage, turn[:, 30:], config), m)
        pre, m = m.pre, mix(streams, stage.ffn_mixing, config)
        streams = spread(streams, experts(stage.ffn_norm(collapse(streams, pre)), stage.moe, 2, config), m)
        pre = m.pre
    hidden = w.norm(collapse(streams, pre))
    before, ids_found, confidence = 11, [], []
    for place in range(BLOCK):
        known = w.markov_in[before]
        confidence.append(torch.sigmoid(w.confidence[0] @ torch.cat((hidden[place], known))))
        before = int((decoder.logits(hidden[place : place + 1])[0] + w.markov_out @ known).argmax())
        ids_found.append(before)
    assert proposal.ids.tolist() == [ids_found]
    torch.testing.assert_close(proposal.confidence[0], torch.stack(confidence), atol=1e-5, rtol=1e-4)


def draft_turns(draft, positions: torch.Tensor) -> torch.Tensor:
    angles = positions[:, None] * draft._frequencies
    return torch.stack((angles.cos(), angles.sin()))


def test_draft_windows_do_not_depend_on_chunks_and_are_made_by_replay(pages: Pages, plain: list[Plain]):
    w, decoder = plain[0], pages.decoder
    whole, cut, half = (pages.table(120) for _ in range(3))
    run(pages, whole, w.ids[:90])
    run(pages, cut, w.ids[:90], cuts=[1, 50, 89])
    run(pages, half, w.ids[:90], num_layers=decoder.config.boundary)
    rebuild(decoder, w.ids[:90], 90, pages.pool, half, exact_replay(decoder.config))
    for stage in range(2):
        rows = [pages.pool.of(table).state("draft", stage).read(torch.arange(16)) for table in (whole, cut, half)]
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])


def test_a_draft_is_state_only_where_it_is_used():
    published = published_config(V41_FLASH)
    published["text_config"] |= {
        "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_target_layer_ids": [37, 38, 39],
        "dspark_noise_token_id": 128799, "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3,
    }  # fmt: skip
    config = parse_config(published, "config.json")
    assert RowPages(config.row_groups(), 128).constant_bytes == 2_715_660
    drafting = config.drafting()
    assert RowPages(drafting.row_groups(), 128).constant_bytes == 2_715_660 + 393_216
    assert RowPages(drafting.row_groups(), 128).bytes_per_page == 113_920
    with pytest.raises(ConfigError, match="no draft stages"):
        parse_config(ENGRAM, "x.json").drafting()
    with pytest.raises(ConfigError, match=r"dspark_target_layer_ids \[3, 8\], expected layers 4 to 8"):
        parse_config({**DRAFT, "dspark_target_layer_ids": [3, 8]}, "x.json")
    tensors = random_tensors(DRAFT)
    del tensors["mtp.1.markov_head.markov_w2.weight"]
    with pytest.raises(ConfigError, match="markov_w2"):
        make_decoder(DRAFT, tensors=tensors)
