"""The whole product on a GPU over HTTP: a ctx and a gen share it, pages cross between the two processes, answers are
those of one process on the CPU."""

from __future__ import annotations

import pytest
import torch
from equal import answer, assert_equal, prompt_of, tiny
from harness import LocalCluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: nothing of this runs without one"),
]
LENGTHS = (3, 16, 40, 130, 300)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_answers_are_the_cpus_and_pages_come_from_the_ctx(tmp_path, run_ahead):
    model = tiny(tmp_path / "m")
    with LocalCluster(tmp_path / "c", model.spec, device="cuda", run_ahead=run_ahead, max_num_tokens=128) as cluster:
        prompts = [prompt_of(n, seed) for seed, n in enumerate(LENGTHS * 3)]
        assert_equal(cluster, model, prompts, 24)
        log = "".join(process.log.read_text() for process in cluster.processes.values())
        assert log.count('"device": "cuda:0"') >= 2 and '"why": "device is \'cuda\'"' in log
        plain = answer(cluster, prompts[-1], 24, logprobs=None)
        assert plain["token_ids"] == answer(cluster, prompts[-1], 24)["token_ids"]
        cluster.quiet()
