"""Answers over ucx and ray are those of one process, as they are over shm and nixl."""

from __future__ import annotations

import pytest
from equal import assert_equal, prompt_of, tiny
from harness import LocalCluster
from small_ray import small_ray

CHUNK = 64
PROMPTS = [prompt_of(n, 500 + n) for n in (1, 15, 16, 17, 64, 65, 130, 323)]


def check(path, **config) -> None:
    model = tiny(path / "model", "llama3")
    with LocalCluster(path / "cluster", model.spec, max_num_tokens=CHUNK, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, PROMPTS)
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
        transport = config["transport"]
        assert cluster.metric("tailrace_transfer_bytes_total", kind="wire", transport=transport) > 0
        assert cluster.metric("tailrace_local_prefills_total") == 0
        cluster.quiet()


def test_answers_over_ucx_are_those_of_one_process(tmp_path):
    """A13 over ucx."""
    pytest.importorskip("ucxx", reason="the package ucxx is not installed")
    check(tmp_path, transport="ucx")


def test_answers_over_ray_are_those_of_one_process(tmp_path):
    with small_ray():
        check(tmp_path, transport="ray", transceiver_runtime="ray")
