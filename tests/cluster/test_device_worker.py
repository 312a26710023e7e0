"""A worker's parts on a GPU: pool in device memory, engine with its graphs, numbers of pages in the arena."""

from __future__ import annotations

import os
import random

import pytest
import torch
from checkpoints import write_tiny_checkpoint
from oracle import Comparison, greedy, reference

from tailrace.cluster.spec import RankSpec
from tailrace.cluster.ties import Ties
from tailrace.cluster.worker import Worker
from tailrace.engine.device_engine import DeviceEngine
from tailrace.engine.offline import Generator
from tailrace.model.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: a worker on one cannot be made"),
]


def worker_of(path, role: str = "gen", **args) -> Worker:
    made = {
        "model": str(path), "device": "cuda", "dtype": "float32", "kv_bytes": "16MiB", "max_num_tokens": 64,
        "max_batch_size": 8, "app_name": f"t{os.getpid()}",
    } | args  # fmt: skip
    spec = RankSpec(role, f"{role}-0", "127.0.0.1", made, "s" * 16)
    return Worker(spec, spec.config, Ties(), threads=1, progress=lambda phase, done: None)


def test_a_worker_computes_on_the_gpu_what_the_cpu_computes(tmp_path):
    path = write_tiny_checkpoint(tmp_path / "m", "llama")
    worker = worker_of(path)
    try:
        worker.load()
        worker.warm_up()
        assert isinstance(worker.engine, DeviceEngine)
        assert worker.engine._run.kv.is_cuda and len(worker.engine._run.book) == 4 + 5 * 3 + 7 + 7
        rng = random.Random(0)
        prompts = [[rng.randrange(4, 512) for _ in range(n)] for n in (5, 33, 90)]
        generator = Generator(worker.engine, worker.kv, max_num_tokens=64, max_batch_size=8)
        found = generator.generate(prompts, [greedy(20, logprobs=None)] * 3)
        comparison = Comparison()
        for want, have in zip(reference(path).generate(prompts, greedy(20)), found, strict=True):
            comparison.add(want.samples[0].logprobs, have.ids)
        comparison.check()
        assert worker.compat.page_bytes == (worker.sizes.gen_layout.bytes_per_page,)
        worker.start()
    finally:
        worker.close()


def test_a_pool_that_the_gpu_has_no_room_for_is_refused_naming_sizes(tmp_path):
    worker = worker_of(write_tiny_checkpoint(tmp_path / "m", "llama"), kv_bytes="4TiB", max_request_tokens=1024)
    try:
        with pytest.raises(ConfigError, match="kv_bytes: the page pool finds no room"):
            worker.load()
    finally:
        worker.close()
