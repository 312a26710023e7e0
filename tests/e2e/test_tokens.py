"""Cases about the tokens themselves through a real hand-off: limits, stops, samples, logprobs, errors in streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import EOS_ID
from equal import Model, answer, assert_equal, prompt_of, tiny
from harness import LocalCluster, sse_events, until
from openai import OpenAI
from oracle import TOP, greedy
from successor import byte_ids, successor_model

CONFIG = {"tokens_per_page": 16, "max_num_tokens": 64}
PROBE_S = 1.0


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
    bound = [timed(cluster, prompt_of(40, s), **forced) for s in range(70, 74)]
    assert all(choice["finish_reason"] == "stop" and choice["text"] == "" for _, choice in bound)
    assert min(took for took, _ in bound) <= 2 * usual + 0.05
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
    seeds = (s for s in range(300, 400) if model.text(expected(model, prompt_of(40, s)).samples[0].ids[:1]).isalpha())
    prompt = prompt_of(40, next(seeds))
    want = expected(model, prompt).samples[0]
    text = model.text(want.ids[:1])
    for ignore_eos in (True, False):
        stopped = answer(cluster, prompt, stop=[text], ignore_eos=ignore_eos)
        assert stopped["finish_reason"] == "stop" and stopped["text"] == ""
        assert stopped["usage"]["completion_tokens"] == 1
        later = answer(cluster, prompt, stop=[text], min_tokens=5, ignore_eos=ignore_eos)
        assert later["token_ids"] == want.ids[: len(later["token_ids"])] and len(later["token_ids"]) >= 5
        assert later["text"].startswith(model.text(want.ids[:5])), "a stop string counted too early"


def timed_n(cluster: LocalCluster, n: int, seed: int) -> float:
    started = time.monotonic()
    cluster.complete(prompt_of(75, seed), 12, n=n, ignore_eos=True)
    return time.monotonic() - started


def test_a20_samples_share_one_prefill_and_keep_their_own_draws(cluster, model):
    prompt = prompt_of(75, 3)
    before = cluster.settled_metric("tailrace_prompt_positions_total", role="ctx")
    reply = cluster.complete(prompt, 12, n=3, ignore_eos=True, return_token_ids=True)
    assert cluster.settled_metric("tailrace_prompt_positions_total", role="ctx") - before == len(prompt)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    want = expected(model, prompt, max_tokens=12).samples[0].ids
    assert all(c["token_ids"] == want for c in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 36
    one, three = (min(timed_n(cluster, n, 700 + 10 * n + s) for s in range(3)) for n in (1, 3))
    assert three < 3 * one + 0.05, (three, one)
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


@pytest.mark.parametrize("stream", [False, True])
def test_a21_chat_logprobs_are_those_of_one_process_and_carry_bytes_and_alternatives(cluster, model, stream):
    messages = [{"role": "user", "content": "Tell me about rivers."}]
    prompt = cluster.post("/tokenize", {"messages": messages}).json()["tokens"]
    [want] = expected(model, prompt, max_tokens=5, ignore_eos=False).samples
    asked = {"messages": messages, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    reply = cluster.post("/v1/chat/completions", asked | {"stream": stream})
    if stream:
        events = [json.loads(e)["choices"] for e in sse_events(reply) if e != "[DONE]"]
        content = [entry for [choice] in events if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        content = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(want.ids)
    assert all(len(entry["top_logprobs"]) == 3 and entry["bytes"] is not None for entry in content)
    np.testing.assert_allclose([e["logprob"] for e in content], [p.logprob for p in want.logprobs], atol=1e-4)
    found = [[top["logprob"] for top in entry["top_logprobs"]] for entry in content]
    np.testing.assert_allclose(found, [[value for _, value in p.top[:3]] for p in want.logprobs], atol=1e-4)


@pytest.mark.parametrize(("before", "text"), [("k", "a🧪e\u0301\u20d7한zq"), ("k👩", "\u200d🚀")])
def test_d4_characters_split_between_ctx_and_gen_arrive_whole(tmp_path, before, text):
    """Each byte is a token: an emoji, combining marks, Hangul, a ZWJ sequence. Ctx gives one byte, gen the rest."""
    data = text.encode()
    head, chain = byte_ids(before), byte_ids(text)
    assert len(set(chain[:-1])) == len(chain) - 1, "a token has one successor"
    forced = successor_model(tmp_path / "forced", [head[-1], *chain])
    with LocalCluster(tmp_path / "cluster", forced.spec, **CONFIG) as cluster:
        for split in range(len(chain)):
            prompt = [*head, *chain[:split]]
            whole = answer(cluster, prompt, len(chain) - split)
            assert whole["token_ids"] == chain[split:]
            with cluster.streaming(prompt, len(chain) - split, ignore_eos=True) as reply:
                events = [e for line in reply.iter_raw() for e in [line.decode()]]  # each piece is whole UTF-8
            lines = "".join(events).split("\n")
            texts = [json.loads(e[6:])["choices"][0]["text"] for e in lines if e.startswith("data: {")]
            assert "".join(texts) == whole["text"]
            if split < len(data) and data[split] & 0xC0 != 0x80:  # it begins with a character
                assert whole["text"] == data[split:].decode()
                assert not any("\ufffd" in piece for piece in texts)


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


def test_c7_d13_a_ctx_that_fails_is_left_alone_and_tried_again_and_its_death_gives_a_5xx_status(model, tmp_path):
    """Retries and local prefill off. Reads fail until the breaker opens: then 503, nothing is reserved; once they no
    longer fail it is closed within one probe interval. Then ctx dies before a first token."""
    config = CONFIG | {"retries": False, "local_prefill": "never", "max_num_tokens": 16, "max_batch_size": 8}
    config |= {"breaker_faults": 3, "breaker_probe_s": PROBE_S}

    def breakers() -> set[str]:
        return {worker["breaker"] for worker in cluster.workers().values()}

    with LocalCluster(tmp_path, model.spec, **config) as cluster, ThreadPoolExecutor(1) as threads:
        cluster.faults("gen-0", fail_read=0, fail_times=-1)
        refused = None
        for i in range(30):
            reply = cluster.post("/v1/completions", {"prompt": prompt_of(40, i), "max_tokens": 4})
            assert reply.status_code == 503, reply.text
            if reply.json()["error"]["message"].startswith("the only workers for it"):
                refused = reply
                break
            time.sleep(0.2)
        assert refused is not None and int(refused.headers["retry-after"]) >= 1
        assert "closed" not in breakers() and cluster.metric("tailrace_breaker_open", peer="ctx-0") == 1
        claims = cluster.info()["claims"]
        assert claims["pages"] == claims["seats"] == claims["prefill_tokens"] == 0
        cluster.quiet(2.0)
        cluster.faults("gen-0")
        until(
            lambda: cluster.ready()["status"] == "ready", PROBE_S + 1, lambda: f"{cluster.ready()}"
        )  # with no traffic
        answer(cluster, prompt_of(40, 99), 4)
        assert breakers() == {"closed"}
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
