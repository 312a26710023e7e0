"""Cases about the tokens themselves through a real hand-off: limits, stops, samples, logprobs, errors in streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import EOS_ID, write_tiny_checkpoint
from equal import Model, answer, assert_equal, prompt_of, tiny
from harness import LocalCluster, sse_events, until
from openai import OpenAI
from oracle import TOP, greedy
from safetensors.torch import load_file, save_file

CONFIG = {"tokens_per_page": 16, "max_num_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def cluster(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), model.spec, **CONFIG) as running:
        running.poison()
        yield running
        running.quiet()


def expected(model: Model, prompt: list[int], samples: int = 1, **params):
    return model.ref.generate([prompt], greedy(params.pop("max_tokens", 16), **params), samples)[0]


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a18_the_limit_is_kept_to_the_token(cluster, model, max_tokens, ignore_eos):
    prompt = prompt_of(37, max_tokens)
    choice = answer(cluster, prompt, max_tokens, ignore_eos=ignore_eos)
    assert choice["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == expected(model, prompt, max_tokens=max_tokens).samples[0].ids
    with cluster.streaming(prompt, max_tokens, ignore_eos=ignore_eos, return_token_ids=True) as reply:
        events = [json.loads(e)["choices"][0] for e in sse_events(reply) if e != "[DONE]"]
    assert [i for e in events for i in e["token_ids"]] == choice["token_ids"]
    assert events[-1]["finish_reason"] == "length"


def test_a18_one_token_needs_no_transfer(cluster):
    before = cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire")
    cluster.complete(prompt_of(200, 900), 1, ignore_eos=True)
    cluster.quiet(2)
    assert cluster.metric("tailrace_transfer_bytes_total", kind="wire") == before


def test_a19_a_first_token_that_is_eos_ends_the_request_as_one_process_would(cluster, model):
    prompt = prompt_of(40, 1)
    forced = {"logit_bias": {str(EOS_ID): 100}, "ignore_eos": False}
    usual = min(timed(cluster, prompt_of(40, s), max_tokens=1)[0] for s in range(60, 64))
    took, choice = timed(cluster, prompt, **forced)
    assert choice["finish_reason"] == "stop" and choice["text"] == ""
    assert took <= 2 * usual + 0.05
    bias = ((EOS_ID, 100.0),)
    for more in ({"min_tokens": 5}, {"ignore_eos": True}):
        want = expected(model, prompt, logit_bias=bias, **({"ignore_eos": False} | more)).samples[0]
        got = answer(cluster, prompt, **(forced | more))
        assert (got["token_ids"], got["finish_reason"]) == (want.ids, want.finish_reason), more


def timed(cluster: LocalCluster, prompt: list[int], max_tokens: int = 16, **options) -> tuple[float, dict]:
    started = time.monotonic()
    choice = answer(cluster, prompt, max_tokens, **options)
    return time.monotonic() - started, choice


def test_a19_a_first_token_among_the_stop_ids_or_completing_a_stop_string(cluster, model):
    prompt = prompt_of(40, 2)
    want = expected(model, prompt).samples[0]
    got = answer(cluster, prompt, stop_token_ids=[want.ids[0]])
    assert got["finish_reason"] == "stop" and got["usage"]["completion_tokens"] == 1
    for more in ({"min_tokens": 5}, {"min_tokens": 5, "ignore_eos": True}):
        reference = expected(model, prompt, stop_token_ids=(want.ids[0],), **({"ignore_eos": False} | more)).samples[0]
        choice = answer(cluster, prompt, **({"ignore_eos": False, "stop_token_ids": [want.ids[0]]} | more))
        assert choice["token_ids"] == reference.ids, more
    text = model.text(want.ids[:1])
    if text and "\ufffd" not in text:
        stopped = answer(cluster, prompt, stop=[text])
        assert stopped["finish_reason"] == "stop" and stopped["text"] == ""


def test_a20_samples_share_one_prefill_and_keep_their_own_draws(cluster, model):
    prompt = prompt_of(75, 3)
    before = cluster.settled_metric("tailrace_prompt_positions_total", role="ctx")
    reply = cluster.complete(prompt, 12, n=3, ignore_eos=True, return_token_ids=True)
    assert cluster.settled_metric("tailrace_prompt_positions_total", role="ctx") - before == len(prompt)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    want = expected(model, prompt, max_tokens=12).samples[0].ids
    assert all(c["token_ids"] == want for c in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 36
    seeded = {"n": 3, "temperature": 1.0, "seed": 42, "ignore_eos": True, "return_token_ids": True}
    drawn = [[c["token_ids"] for c in cluster.complete(prompt, 12, **seeded)["choices"]] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn[0]}) == 3
    reference = expected(model, prompt, samples=3, max_tokens=12, temperature=1.0, seed=42)
    assert drawn[0] == [s.ids for s in reference.samples]


def test_a20_a_batch_of_prompts_with_two_samples_each_comes_in_order(cluster, model):
    prompts = [prompt_of(20, 5), prompt_of(50, 6)]
    reply = cluster.complete(prompts, 8, n=2, ignore_eos=True, return_token_ids=True)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    for number, prompt in enumerate(prompts):
        want = expected(model, prompt, max_tokens=8).samples[0].ids
        assert [c["token_ids"] for c in reply["choices"][2 * number : 2 * number + 2]] == [want, want]


def test_a21_every_token_has_its_logprobs_the_first_and_the_prompt_included(cluster, model):
    prompt = prompt_of(45, 7)
    want = expected(model, prompt, prompt_logprobs=TOP, max_tokens=6)
    choice = answer(cluster, prompt, 6, echo=True)
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(prompt) + 6
    assert logprobs["token_logprobs"][0] is None
    reference = [p.logprob for p in want.prompt_logprobs] + [p.logprob for p in want.samples[0].logprobs]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], reference, atol=1e-4)
    with cluster.streaming(prompt, 6, ignore_eos=True, logprobs=TOP) as reply:
        events = [json.loads(e)["choices"][0] for e in sse_events(reply) if e != "[DONE]"]
    streamed = [p for e in events if e["logprobs"] for p in e["logprobs"]["token_logprobs"]]
    np.testing.assert_allclose(streamed, reference[len(prompt) - 1 :], atol=1e-4)


def test_a21_chat_logprobs_carry_bytes_and_alternatives(cluster):
    client = cluster.openai()
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Tell me about rivers."}],
        max_tokens=5, temperature=0, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 and entry.bytes is not None for entry in content)


def successor_model(path, chain: list[int]) -> Model:
    """A checkpoint that answers each token of the chain with the next one, whatever stood before."""
    directory = write_tiny_checkpoint(path, "llama")
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    embed = tensors["model.embed_tokens.weight"]
    head = tensors["lm_head.weight"] * 0
    for now, following in zip(chain, chain[1:], strict=False):
        head[following] = embed[now] * 10
    tensors["lm_head.weight"] = head.contiguous()
    save_file(tensors, file)
    return Model(str(directory))


@pytest.mark.parametrize("split", [1, 2, 3])
def test_d4_a_character_split_between_ctx_and_gen_arrives_whole(tmp_path, split):
    """The 4 bytes of an emoji are 4 tokens; ctx's token is the `split`-th of them, gen's are the others."""
    from tailrace.model.source import open_source

    tokenizer = open_source(str(write_tiny_checkpoint(tmp_path / "plain", "llama"))).tokenizer
    by_byte = {tokenizer.id_to_bytes(i): i for i in range(4, tokenizer.vocab_size)}
    emoji = "🧪"
    letters = [by_byte[bytes([b])] for b in emoji.encode()]
    chain = [by_byte[b"a"], *letters, by_byte[b"z"], by_byte[b"q"]]
    forced = successor_model(tmp_path / "forced", chain)
    with LocalCluster(tmp_path / "cluster", forced.spec, **CONFIG) as cluster:
        prompt = [by_byte[b"k"], *chain[:split]]
        whole = answer(cluster, prompt, len(chain) - split)
        assert whole["token_ids"] == chain[split:]
        with cluster.streaming(prompt, len(chain) - split, ignore_eos=True) as reply:
            texts = [json.loads(e)["choices"][0]["text"] for e in sse_events(reply) if e != "[DONE]"]
        assert "".join(texts) == whole["text"]
        full = cluster.complete([by_byte[b"k"], chain[0]], len(chain) - 1, ignore_eos=True)["choices"][0]["text"]
        assert full == emoji + "zq"
        with cluster.streaming([by_byte[b"k"], chain[0]], len(chain) - 1, ignore_eos=True) as reply:
            texts = [json.loads(e)["choices"][0]["text"] for e in sse_events(reply) if e != "[DONE]"]
        assert "".join(texts) == full and not any("\ufffd" in text for text in texts)


def test_d9_prompts_without_tokens_are_refused_and_no_worker_notices(cluster):
    pids = {n: p.pid for n, p in cluster.processes.items()}
    for prompt in ("", [""], [], [[]]):
        reply = cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt", (prompt, reply.text)
    reply = cluster.post("/v1/chat/completions", {"messages": [], "max_tokens": 4})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"
    special = cluster.post("/v1/completions", {"prompt": "<|bos|><|eos|>", "max_tokens": 4})
    assert special.status_code == 200
    assert {n: p.pid for n, p in cluster.processes.items() if p.alive} == pids


def test_d13_bad_input_of_a_stream_is_a_400_in_json(cluster):
    reply = cluster.post("/v1/completions", {"prompt": "a", "stream": True, "temperature": "hot"})
    assert reply.status_code == 400
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json()["error"]["param"] == "temperature"


def test_d13_a_ctx_that_dies_before_the_first_token_gives_a_5xx_status(model, tmp_path):
    config = CONFIG | {"retries": False, "local_prefill": "never", "max_num_tokens": 16, "max_batch_size": 8}
    with LocalCluster(tmp_path, model.spec, **config) as cluster, ThreadPoolExecutor(1) as threads:
        request = {"prompt": prompt_of(3500, 1), "max_tokens": 4, "stream": True}
        begun = threads.submit(cluster.post, "/v1/completions", request)
        until(lambda: cluster.workers()["ctx-0"]["running"] == 1, 5, lambda: "it never ran")
        cluster.kill("ctx-0")
        reply = begun.result(30)
        assert reply.status_code >= 500
        assert "message" in reply.json()["error"]


def test_d13_a_gen_that_dies_after_five_tokens_gives_one_error_event(model, tmp_path):
    with LocalCluster(tmp_path, model.spec, **CONFIG, retries=False) as cluster:
        with cluster.streaming(prompt_of(30, 1), 3000, ignore_eos=True) as reply:
            events = sse_events(reply)
            for _ in range(5):
                next(events)
            cluster.kill("gen-0")
            rest = list(events)
        assert [e for e in rest if '"error"' in e] == rest[-1:]
        assert "[DONE]" not in rest and not any('"finish_reason":"stop"' in e for e in rest)


def test_the_openai_client_gets_what_it_asks_for(cluster):
    client: OpenAI = cluster.openai()
    name = client.models.list().data[0].id
    chat = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "What is two plus two?"}], max_tokens=8, temperature=0, n=2
    )
    assert len(chat.choices) == 2 and chat.choices[0].message.content == chat.choices[1].message.content
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    stream = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "What is two plus two?"}], max_tokens=8, temperature=0,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens <= 8
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == chat.choices[0].message.content
    done = client.completions.create(model=name, prompt=["The river", "The mill"], max_tokens=6, temperature=0)
    assert [c.index for c in done.choices] == [0, 1]


def test_sampled_requests_are_equal_to_one_process_and_to_themselves(cluster, model):
    for seed in (1, -5, 2**63 + 11):
        prompt = prompt_of(33, 40)
        options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": seed, "presence_penalty": 0.4,
                   "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_p": 0.01}  # fmt: skip
        first = answer(cluster, prompt, 16, **options)
        second = answer(cluster, prompt, 16, **options)
        assert first["token_ids"] == second["token_ids"]
        params = {k: v for k, v in options.items() if k != "seed"} | {"seed": seed % 2**64}
        assert first["token_ids"] == expected(model, prompt, **params).samples[0].ids


def test_many_at_once_are_all_right(cluster, model):
    assert_equal(cluster, model, [prompt_of(10 + 7 * i, 500 + i) for i in range(32)], at_once=32)
