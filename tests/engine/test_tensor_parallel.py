"""One decoder over 2 and 4 ranks, each a process of its own: what it says, what its pages hold, and what ends it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Comparison, Reference, greedy, reference, same_logprobs

from tailrace.engine.engine import TORCH_DTYPES, Engine, pool_tensor
from tailrace.engine.grammar import Grammars
from tailrace.engine.group import Channel, Followers, Stop, Vote
from tailrace.engine.offline import Generator
from tailrace.engine.step import Row, StepPlan
from tailrace.kv_cache.arena import ArenaGroup, arena_name
from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.errors import WorkerError
from tailrace.model.ranks import AllReduce
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.shard import Shard
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights

SCRIPT = Path(__file__).resolve().parents[1] / "follower_process.py"
NUM_PAGES, PAGE = 128, 16
LENGTHS = [1, 15, 16, 17, 40, 130]


class FollowerProcess:
    """One follower; it can take part in one group after another."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(theirs.fileno())],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self.channel = Channel(ours, "a follower")

    def begin(self, **job: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """Have it end, once its job is over."""
        assert self.process.stdin is not None
        self.channel.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> str:
        """What it wrote to stderr."""
        self.finish()
        self.process.stdin = None
        try:
            return self.process.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def followers() -> Iterator[list[FollowerProcess]]:
    """Three, shared by all groups of this file; those that a test kills are its own."""
    made = [FollowerProcess() for _ in range(3)]
    yield made
    for follower in made:
        follower.finish()
    for follower in made:
        follower.end()


@contextlib.contextmanager
def group(
    directory: Path, processes: list[FollowerProcess], model: Path, tp: int, dtype: str = "float32"
) -> Iterator[Reference]:
    """Rank 0 here and tp - 1 further ranks, poisoned pages, and a generator over them."""
    source = open_source(str(model))
    weights = load_weights(source, dtype=TORCH_DTYPES[dtype], quantized=False, shard=Shard(0, tp))
    layout = single_layout(state_groups(weights.config), PAGE, dtype)
    names = [arena_name("engine", "w", f"{time.monotonic_ns()}", rank) for rank in range(tp)]
    arenas = ArenaGroup.create(names, layout, NUM_PAGES, directory)
    meeting = directory / f"meeting-{names[0]}"
    common = {"model": str(model), "tp": tp, "dtype": dtype, "tokens_per_page": PAGE, "meeting": str(meeting)}
    used = processes[: tp - 1]
    for rank, process in enumerate(used, 1):
        process.begin(rank=rank, arena=names[rank], directory=str(directory), **common)
    assert [process.channel.receive(30.0) for process in used] == [Vote("")] * len(used)
    pools = [pool_tensor(pages, layout) for pages in arenas.pages]
    others = Followers([process.channel for process in used], pools[1:])
    decoder = Decoder(weights, AllReduce(Shard(0, tp), str(meeting), 30.0))
    engine = Engine(decoder, pools[0], followers=others)
    engine.poison(range(1, NUM_PAGES))
    kv = KvManager(layout, NUM_PAGES, 64, arenas.generations)
    kv.set_poison(engine.poison)
    generator = Generator(engine, kv, eos_ids=source.eos_ids, max_num_tokens=64, max_batch_size=8)
    grammars = Grammars(lambda: source.tokenizer, source.config.vocab_size, source.eos_ids)
    yield Reference(source, weights, layout, kv, engine, pools[0], generator, grammars)
    with contextlib.suppress(WorkerError):  # those that a test has killed
        others.tell(Stop())
    arenas.unlink()


def prompts_of(lengths: list[int], seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 512, n).tolist() for n in lengths]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),  # 2 key-value heads, as all of them but the next: with 4 ranks each is held twice
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("mistral", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_the_output_of_several_ranks_is_that_of_one(tiny, tmp_path, followers, family, overrides, tp):
    prompts = prompts_of(LENGTHS)
    path = tiny(family, **overrides)
    alone = reference(path, max_num_tokens=64, max_batch_size=8)
    seeded = [SamplingParams(max_tokens=12, temperature=0.8, seed=50 + i, ignore_eos=True) for i in range(len(prompts))]
    comparison = Comparison()
    with group(tmp_path, followers, path, tp) as several:
        found = several.generate(prompts, greedy(16))
        drawn = several.generate(prompts, seeded)
    for a, b in zip(alone.generate(prompts, greedy(16)), found, strict=True):
        comparison.add(a.samples[0].logprobs, b.ids, [logprob.top for logprob in b.samples[0].logprobs])
        same_logprobs(a.samples[0].logprobs[0].top, b.samples[0].logprobs[0].top)
    comparison.check()
    assert [r.ids for r in drawn] == [r.ids for r in alone.generate(prompts, seeded)]


@pytest.mark.parametrize(("tp", "held"), [(2, [[0], [1]]), (4, [[0], [0], [1], [1]])])
def test_each_rank_holds_its_own_heads_of_every_page(tiny, tmp_path, followers, tp, held):
    path = tiny("qwen3")
    alone, prompt = reference(path), np.array(prompts_of([40])[0], np.int32)
    plan = StepPlan([Row("r", prompt, 0, np.array([1, 2, 3], np.int32))])
    alone.engine.step(plan)
    with group(tmp_path, followers, path, tp) as several:
        several.engine.step(plan)
        pools = [several.engine._pools[rank][1:4].clone() for rank in range(tp)]
    for rank, heads in enumerate(held):
        assert pools[rank].shape[3] == 1
        assert torch.allclose(pools[rank], alone.pool[1:4, :, :, heads], atol=1e-4), rank


def test_a_16_bit_decoder_is_split_too(tiny, tmp_path, followers):
    path, prompts = tiny("llama"), prompts_of([40])
    exact = reference(path).generate(prompts, greedy(1))[0].samples[0].logprobs[0]
    with group(tmp_path, followers, path, 2, "bfloat16") as several:
        two = several.generate(prompts, greedy(1))[0].samples[0].logprobs[0]
    same_logprobs(exact.top[:2], two.top[:2], tolerance=0.2)  # one process in bf16 is 0.17 from it


def test_copies_poison_and_warm_up_reach_the_pages_of_all_ranks(tiny, tmp_path, followers):
    with group(tmp_path, followers, tiny("llama"), 4) as several:
        engine, pools = several.engine, several.engine._pools
        for rank, pool in enumerate(pools):
            pool[5] = rank
        engine.copy_pages([5], [7])
        engine.poison([5])
        engine.warm_up(64, 4)
        assert [float(pool[7].min()) for pool in pools] == [0, 1, 2, 3]
        assert all(pool[5].isnan().all() and (pool[0] == 0).all() for pool in pools)


def test_a_killed_rank_ends_the_others(tiny, tmp_path):
    """Rank 0 learns it in its next pass, and the ranks that are left end by themselves."""
    own = [FollowerProcess() for _ in range(3)]
    with group(tmp_path, own, tiny("llama"), 4) as several:
        several.generate(prompts_of([5]), greedy(2))
        own[1].process.kill()
        own[1].process.wait()
        started = time.monotonic()
        with pytest.raises(WorkerError, match="rank 0 of 4 lost the others|a follower is gone"):
            several.generate(prompts_of([5]), greedy(4))
        assert time.monotonic() - started < 20  # far below the limit of a sum
        for follower in own:
            follower.finish()
        said = [own[i].end() for i in (0, 2)]
    assert own[0].process.returncode and own[2].process.returncode
    assert all("lost the others" in text or "rank 0 is gone" in text for text in said), said
    own[1].end()


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit(tmp_path):
    with pytest.raises(WorkerError, match="rank 0 of 2 did not meet the others"):
        AllReduce(Shard(0, 2), str(tmp_path / "meeting"), 0.5)
