"""Families with rows of their own over HTTP: prefilled in one process, decoded in another, the answers of one process.

What needs many lengths is in tests/transfer/test_row_handoff.py, on the same loops and transports in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from equal import Model, answer, assert_equal, prompt_of
from harness import LocalCluster
from mla_checkpoints import write_knowing_mla
from tiny_families import FAMILIES, write_tiny_family

PAGE = 16
pytestmark = pytest.mark.soak  # five processes each time; the same loops and transports are in make test, see above


def moved_pages(model: Model, length: int) -> int:
    return model.ref.layout.moved_pages(length)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["shm", "nixl"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_one_process(tmp_path: Path, family: str, kind: str):
    model = Model(str(write_tiny_family(tmp_path / "model", family)))
    lengths = (1, 79, 129)
    config = {"transport": kind, "tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": 40}
    with LocalCluster(tmp_path / "cluster", model.spec, **config) as cluster:
        cluster.poison()
        prompts = [prompt_of(n, 100 + n) for n in lengths]
        assert_equal(cluster, model, prompts, 8)
        page_bytes = model.ref.layout.bytes_per_page
        moved = cluster.settled_metric("tailrace_transfer_bytes_total", kind="logical", transport=kind)
        assert moved == sum(moved_pages(model, n) for n in lengths) * page_bytes
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
        warm = assert_equal(cluster, model, prompts[1:], 8)
        assert [w["usage"]["prompt_tokens_details"]["cached_tokens"] for w in warm] == [64, 128]
        again = cluster.settled_metric("tailrace_transfer_bytes_total", kind="logical", transport=kind) - moved
        assert again == sum(moved_pages(model, n) - n // PAGE for n in lengths[1:]) * page_bytes, (
            "history that gen holds is not sent again, the state always is"
        )
        two = answer(cluster, prompts[1], 8, n=2)
        assert two["token_ids"] == warm[0]["token_ids"]
        cluster.quiet()


@pytest.mark.parametrize("family", ["v4", "v41", "v41-engram"])
def test_in_a_small_pool_the_youngest_gives_way_and_is_computed_again(tmp_path: Path, family: str):
    """A15: two of four long generations lose their pages midway; nothing is asked of ctx again."""
    model = Model(str(write_tiny_family(tmp_path / "model", family)))
    layout = model.ref.layout
    pages = 2 * layout.num_pages(121) - 2  # two begin, and cannot both end
    config = {
        "tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": 40, "kv_bytes": 400 * layout.bytes_per_page,
        "gen_config": {"kv_bytes": pages * layout.bytes_per_page}, "max_request_tokens": 160, "transport": "nixl",
    }  # fmt: skip
    with LocalCluster(tmp_path / "cluster", model.spec, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(n, 7 * n) for n in (31, 32, 33, 35)], 90)
        assert cluster.settled_metric("tailrace_preemptions_total", role="gen") > 0
        cluster.quiet()


def test_unset_pages_take_128_tokens(tmp_path: Path):
    model = Model(str(write_tiny_family(tmp_path / "model", "v41")))
    with LocalCluster(tmp_path / "cluster", model.spec, max_num_tokens=64) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(n, n) for n in (127, 128, 129, 300)], 8)
        cluster.quiet()


@pytest.mark.parametrize("family", ["v3", "v41"])
def test_drafts_change_no_answer_and_are_counted(tmp_path: Path, family: str):
    """ctx makes the draft block's rows of the prompt, gen guesses from them."""
    path = tmp_path / "model"
    is_dspark = family == "v41"
    model = Model(str(write_tiny_family(path, "v41-draft") if is_dspark else write_knowing_mla(path, "deepseek_v3")))
    config = {"tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": 40, "gen_config": {"drafts": 3}}
    with LocalCluster(tmp_path / "cluster", model.spec, transport="shm", **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(n, 100 + n) for n in (1, 30, 79)], 40)
        proposed = cluster.settled_metric("tailrace_draft_tokens_total", result="proposed")
        accepted = cluster.settled_metric("tailrace_draft_tokens_total", result="accepted")
        assert 0 < accepted < proposed
        cluster.quiet()


def test_a_prompts_end_left_to_gen_answers_as_one_process_and_gen_draws_the_first_token(tmp_path: Path):
    """An exact replay, so that answers are known: 5 upper layers of 16 tokens."""
    model = Model(str(write_tiny_family(tmp_path / "model", "v41-engram")))
    replayed, lengths = 5 * 15 + 1, (1, 77, 130)
    config = {
        "transport": "nixl", "tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": 40,
        "handoff_mode": "bounded_replay_on_generation", "replay": {"decoder": replayed}, "local_prefill": "never",
    }  # fmt: skip
    with LocalCluster(tmp_path / "cluster", model.spec, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(n, 100 + n) for n in lengths], 8)
        handed = [max(1, n - replayed) for n in lengths]
        page_bytes = model.ref.layout.bytes_per_page
        moved = cluster.settled_metric("tailrace_transfer_bytes_total", kind="logical", transport="nixl")
        assert moved == sum(moved_pages(model, n) for n in handed) * page_bytes
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen", kind="replayed") == sum(
            min(n, replayed) for n in lengths
        )
        assert cluster.settled_metric("tailrace_output_tokens_total", role="ctx") == 0
        one = answer(cluster, prompt_of(130, 230), 1)
        two = answer(cluster, prompt_of(130, 230), 8, n=2)
        assert two["token_ids"][:1] == one["token_ids"]
        echo = {"prompt": prompt_of(90, 231), "echo": True, "max_tokens": 0}
        refused = cluster.post("/v1/completions", echo | {"logprobs": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs", refused.text
        assert cluster.post("/v1/completions", echo).json()["usage"]["prompt_tokens"] == 90, "the lower half is enough"
        cluster.quiet()
