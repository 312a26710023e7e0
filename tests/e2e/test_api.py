"""The API end to end, on two ctx and two gens: cases D1 D3 D6 D8 D10 D11 D14 D15 D16 D17 D20 D21, and the receipt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from api_checks import hold_to_its_description
from checkpoints import VOCAB_SIZE
from equal import Model, assert_equal, prompt_of, tiny
from harness import LocalCluster, sse_events, until
from oracle import TOP, greedy
from successor import byte_ids, successor_model

CONFIG = {"tokens_per_page": 16, "max_num_tokens": 64, "max_request_tokens": 512, "verify_pages": True}
BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def cluster(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), model.spec, ctx=2, gen=2, **CONFIG) as running:
        running.poison()
        pids = {name: process.pid for name, process in running.processes.items()}
        yield running
        assert {name: process.pid for name, process in running.processes.items() if process.alive} == pids
        running.quiet()


def expected(model: Model, prompt: list[int], max_tokens: int = 16, samples: int = 1, **params: Any):
    return model.ref.generate([prompt], greedy(max_tokens, **params), samples)[0]


def events_of(cluster: LocalCluster, path: str, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", f"{cluster.base_url}{path}", json=body | {"stream": True}, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        return list(sse_events(reply))


def streamed(events: list[str]) -> tuple[str, str]:
    """Text and finish reason of a stream of one choice."""
    choices = [json.loads(e)["choices"] for e in events if e != "[DONE]"]
    each = [choice for found in choices for choice in found]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in each)
    return text, each[-1]["finish_reason"]


def asked(path: str, words: str, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": words}]} if "chat" in path else {"prompt": words}
    return {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **prompt, **body}


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, (reply.status_code, reply.text)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def canary(cluster: LocalCluster, model: Model, seed: int) -> None:
    assert_equal(cluster, model, [prompt_of(30, seed)])


# -------------------------------------------------------------------------------------------------------------- receipt


def test_the_receipt_tells_what_moved_and_a_second_time_what_did_not(cluster, model):
    prompt = prompt_of(100, 7000)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "receipt": True}
    # a conversation stays, and so do its pages
    first, again = (cluster.post("/v1/completions", body | {"conversation_id": "r"}) for _ in range(2))
    (told,) = json.loads(first.headers["x-tailrace-receipt"])
    page_bytes = model.ref.layout.bytes_per_page
    assert told["ctx"].startswith("ctx-") and told["gen"].startswith("gen-") and told["attempt"] == 1
    assert (told["pages"], told["pages_skipped"]) == (7, 0) and told["checksum"] == "verified"
    assert told["logical_bytes"] == told["wire_bytes"] == 7 * page_bytes or told["wire_bytes"] > 6 * page_bytes
    assert (told["transport"], told["codec"]) == ("shm", "raw") and told["hand_off_s"] > 0
    parts = told["ttft_s"]
    assert abs(parts.pop("whole") - sum(parts.values())) < 1e-3 and parts["prefill"] > 0
    (told,) = json.loads(again.headers["x-tailrace-receipt"])
    assert told["pages"] + told["pages_skipped"] in (0, 7)
    assert first.json()["choices"] == again.json()["choices"]
    assert "x-tailrace-receipt" not in cluster.post("/v1/completions", body | {"receipt": False}).headers


# -------------------------------------------------------------------------------------------------------- D1, D3: stops


CHAIN = "wxyz🧪 ab한cd.efg!hij"  # one token a byte, so that every stop string spans tokens


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Answers `v` with CHAIN: `w` is drawn by ctx, all else by gen."""
    path = tmp_path_factory.mktemp("chained")
    forced = successor_model(path / "forced", byte_ids("v" + CHAIN))
    with LocalCluster(path / "cluster", forced.spec, **CONFIG) as running:
        yield running
        running.quiet()


@pytest.mark.parametrize(
    "stops",
    [
        ["wx"], ["wxyz🧪 "], ["w"], ["xy"], ["z🧪"], ["🧪"], ["🧪 ab한"], ["한"], ["한c"], ["d.efg!hij"], ["xyz🧪 a"],
        ["ab한", "ab한c"], ["yz", "xyz", "xyz?"], ["b한cd.X", "d.e"], ["🧪🧪", "f"], ["never", "wxyz?"],
    ],
    ids=str,
)  # fmt: skip
def test_d1_a_stop_string_over_tokens_characters_and_the_hand_off_leaks_nothing(chained, stops):
    found = [(CHAIN.find(stop) + len(stop), CHAIN.find(stop)) for stop in stops if stop in CHAIN]
    ends, at = min(found) if found else (len(CHAIN), len(CHAIN))
    tokens = len(CHAIN[:ends].encode())
    body = {
        "prompt": byte_ids("kv"), "max_tokens": len(CHAIN.encode()), "temperature": 0, "ignore_eos": True,
        "stop": stops, "stream_options": {"include_usage": True},
    }  # fmt: skip
    whole = chained.post("/v1/completions", body).json()
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (CHAIN[:at], "stop" if found else "length")
    events = events_of(chained, "/v1/completions", body)
    assert streamed([e for e in events[:-1] if json.loads(e)["choices"]]) == (choice["text"], choice["finish_reason"])
    assert json.loads(events[-2])["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == tokens


def test_d3_empty_stop_strings_are_refused_and_none_at_all_is_as_if_absent(cluster):
    for stop in ("", [""], ["a", ""]):
        error = error_of(cluster.post("/v1/completions", {"prompt": "a", "stop": stop}), 400)
        assert error["param"] == "stop" and "stop" in error["message"]
    plain = cluster.complete(prompt_of(20, 3), 6, ignore_eos=True)["choices"]
    for stop in (None, []):
        assert cluster.complete(prompt_of(20, 3), 6, ignore_eos=True, stop=stop)["choices"] == plain


# -------------------------------------------------------------------------------------------------- D6, D8: usage, echo


@BOTH
def test_d6_usage_comes_in_one_extra_chunk_and_only_if_asked_for(cluster, path):
    body = asked(path, "The river turns", n=2)
    total = cluster.post(path, body).json()["usage"]
    for include in (True, False, None):
        options = {} if include is None else {"stream_options": {"include_usage": include}}
        events = events_of(cluster, path, body | options)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        extra = [c for c in chunks if c["choices"] == []]
        if include:
            assert len(extra) == 1 and chunks[-1] is extra[0]
            assert {k: extra[0]["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
                k: total[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")
            }
            assert all(c["usage"] is None for c in chunks[:-1])
        else:
            assert not extra and not any("usage" in c for c in chunks)


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("echo", [True, False])
def test_d8_echo_with_and_without_output_never_asks_a_gen(cluster, model, echo, max_tokens, logprobs):
    text = "The miller opened the gate"
    ids = model.ref.source.tokenizer.encode(text, special=True)
    before = cluster.settled_metric("tailrace_transfer_bytes_total")
    body = {"prompt": text, "max_tokens": max_tokens, "echo": echo, "logprobs": logprobs, "temperature": 0}
    reply = cluster.post("/v1/completions", body)
    if not echo and max_tokens == 0:
        assert error_of(reply, 400)["param"] == "max_tokens"
        return
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    [choice] = whole["choices"]
    assert whole["usage"]["completion_tokens"] == max_tokens and choice["finish_reason"] in ("length", "stop")
    assert choice["text"].startswith(text) is echo
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        found = choice["logprobs"]["token_logprobs"]
        assert len(found) == (len(ids) if echo else 0) + max_tokens
        if echo:
            want = [p.logprob for p in expected(model, ids, 1, prompt_logprobs=TOP).prompt_logprobs]
            assert found[0] is None
            np.testing.assert_allclose(found[1 : len(ids)], want, atol=1e-4)
            assert "".join(choice["logprobs"]["tokens"][: len(ids)]) == text
    assert cluster.settled_metric("tailrace_transfer_bytes_total") == before


# --------------------------------------------------------------------------------------- D10, D11, D14, D16, D17: input


def test_d10_prompts_of_zero_ids_and_batches_keep_count_and_order(cluster, model):
    for prompt in ([0], [0, 0], [[0], [1, 2]], ["a", "b"]):
        reply = cluster.complete(prompt, 3, ignore_eos=True, return_token_ids=True)
        one = [prompt] if isinstance(prompt[0], int) else prompt
        ids = [model.ref.source.tokenizer.encode(p, special=True) if isinstance(p, str) else p for p in one]
        assert [c["index"] for c in reply["choices"]] == list(range(len(one)))
        assert [c["token_ids"] for c in reply["choices"]] == [expected(model, p, 3).samples[0].ids for p in ids]
    error_of(cluster.post("/v1/completions", {"prompt": [[1], "a"]}), 400)


def test_d11_ids_outside_the_vocabulary_are_refused_and_reach_no_worker(cluster, model):
    before = cluster.settled_metric("tailrace_prompt_positions_total")
    for wrong in (VOCAB_SIZE, VOCAB_SIZE + 1, -1, 2**63, "7"):
        error_of(cluster.post("/v1/completions", {"prompt": [1, wrong]}), 400)
        error_of(cluster.post("/v1/completions", {"prompt": "a", "stop_token_ids": [wrong]}), 400)
        if wrong != "7":  # as a key, "7" is how 7 is written
            error_of(cluster.post("/v1/completions", {"prompt": "a", "logit_bias": {str(wrong): 1}}), 400)
    assert cluster.settled_metric("tailrace_prompt_positions_total") == before
    canary(cluster, model, 8000)


def test_d14_the_limit_is_kept_in_one_attempt_and_both_numbers_are_named(cluster):
    limit = cluster.ready()["max_request_tokens"]
    assert limit == CONFIG["max_request_tokens"]
    reply = cluster.complete(prompt_of(limit - 1, 1), None, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 1
    before = cluster.settled_metric("tailrace_prompt_positions_total")
    for num_tokens, more in ((limit, 1), (limit + 1, 1), (10 * limit, 1), (10, limit), (10, 10**12)):
        started = time.monotonic()
        reply = cluster.post("/v1/completions", {"prompt": prompt_of(num_tokens, 2), "max_tokens": more})
        assert time.monotonic() - started < 1
        error = error_of(reply, 400)
        assert str(num_tokens) in error["message"] and str(limit) in error["message"], error
    assert cluster.settled_metric("tailrace_prompt_positions_total") == before


def test_d14_the_limit_is_that_of_the_smaller_pool(model, tmp_path):
    small = {"kv_bytes": 8 * model.ref.layout.bytes_per_page}
    config = {"tokens_per_page": 16, "gen_config": small}
    with LocalCluster(tmp_path, model.spec, **config) as cluster:
        limit = cluster.ready()["max_request_tokens"]
        assert 16 < limit <= 8 * 16
        assert cluster.complete(prompt_of(limit - 1, 1), None, ignore_eos=True)["usage"]["completion_tokens"] == 1
        error = error_of(cluster.post("/v1/completions", {"prompt": prompt_of(limit, 1)}), 400)
        assert str(limit) in error["message"]


@BOTH
def test_d16_whatever_is_wrong_with_a_body_is_told_in_the_error_object(cluster, path):
    url, head = f"{cluster.base_url}{path}", {"content-type": "application/json"}
    for data in (b"", b'{"prompt": "a"', b"[]", b'"x"', b"\xff", b'{"a": NaN', b'{"prompt": ' + b"[" * 50_000):
        error_of(httpx.post(url, content=data, headers=head), 400)
    for field, value in (("max_tokens", "5"), ("temperature", float("nan")), ("n", 1.5), ("stream", "yes")):
        body = json.dumps(asked(path, "a") | {field: value})
        assert error_of(httpx.post(url, content=body, headers=head), 400)["param"] == field
    error_of(httpx.post(url, content=b"a" * 50_000_000, headers=head, timeout=30), 413)
    error_of(httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}), 415)
    nulls = dict.fromkeys(("stop", "n", "seed", "logprobs", "stream", "stream_options", "user", "logit_bias", "top_k"))
    plain, odd = (
        cluster.post(path, asked(path, "a") | more).json() for more in ({}, nulls | {"grüße": [1], "peer": 1})
    )
    assert plain["choices"] == odd["choices"]


def test_d17_text_parts_are_one_text_and_an_image_is_refused_by_its_type(cluster):
    def ask(content: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        return cluster.post("/v1/chat/completions", body)

    whole, parts = ask("ab").json(), ask([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).json()
    assert whole["choices"] == parts["choices"] and whole["usage"]["prompt_tokens"] == parts["usage"]["prompt_tokens"]
    assert ask([]).json()["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert "image_url" in error_of(ask([{"type": "text", "text": "a"}, image]), 400)["message"]


# --------------------------------------------------------------------------------------------------- D15, D20: sampling


@BOTH
def test_d15_whatever_the_client_sets_ctx_draws_one_token_a_sample(cluster, path):
    ctx = {"role": "ctx"}
    for n, more in (
        (1, {"max_tokens": 9}), (1, {"min_tokens": 7}), (2, {"n": 2}), (1, {"stop": ["\x00never"]}),
        (1, {"stream_options": {"include_usage": True}, "stream": False}),
        (1, {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}),
        (1, {"max_completion_tokens": 9, "max_tokens": None} if "chat" in path else {"best_of": 1}),
    ):  # fmt: skip
        before = cluster.settled_metric("tailrace_output_tokens_total", **ctx)
        reply = cluster.post(path, asked(path, "What is two plus two?", **more))
        assert reply.status_code == 200, (more, reply.text)
        wanted = more.get("max_completion_tokens") or more.get("max_tokens") or 12
        assert reply.json()["usage"]["completion_tokens"] == n * wanted
        drawn = cluster.settled_metric("tailrace_output_tokens_total", **ctx) - before
        assert drawn == n, (more, drawn)


def test_d20_a_seeded_request_is_the_same_beside_any_mates_and_wherever_it_runs(cluster, model):
    prompt = prompt_of(45, 77)
    seeded = {"temperature": 1.0, "seed": 1234, "ignore_eos": True, "return_token_ids": True}
    want = expected(model, prompt, 12, temperature=1.0, seed=1234).samples[0].ids

    def once(n: int = 1) -> list[list[int]]:
        return [c["token_ids"] for c in cluster.complete(prompt, 12, n=n, **seeded)["choices"]]

    assert once() == [want]
    with ThreadPoolExecutor(8) as threads:
        for mates in (1, 3, 7):
            others = [
                threads.submit(cluster.complete, prompt_of(20 + i, 90 + i), 24, temperature=1.0, ignore_eos=True)
                for i in range(mates)
            ]
            assert once() == [want], mates
            for other in others:
                other.result()
    two = once(2)
    assert two == once(2) and two[0] == want and two[1] != want
    for seed in (-1, -(2**63), 2**64 - 1):
        pair = [cluster.complete(prompt, 6, **(seeded | {"seed": seed}))["choices"][0]["token_ids"] for _ in range(2)]
        assert pair[0] == pair[1]
    error_of(cluster.post("/v1/completions", {"prompt": "a", "seed": 2**64}), 400)


# -------------------------------------------------------------------------------------------------------- D21: logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_d21_offsets_run_with_the_text_and_bytes_are_the_text(cluster, top, echo, stream):
    """The tiny tokenizer spells beyond ASCII byte by byte, so prompt and output have tokens of part of a character."""
    body = {"prompt": "a🙂 né 한", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": top, "echo": echo}
    if stream:
        choices = [json.loads(e)["choices"][0] for e in events_of(cluster, "/v1/completions", body)[:-1]]
        found = [c["logprobs"] for c in choices if c["logprobs"]]
        logprobs = {key: [v for part in found for v in part[key]] for key in found[0]}
        text = "".join(c["text"] for c in choices)
    else:
        [choice] = cluster.post("/v1/completions", body).json()["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    assert len(logprobs["tokens"]) == len(offsets) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    for tops, value in zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True):
        assert (tops is None) == (value is None)
        if tops is not None:
            assert value in tops.values() and max(top, 1) <= len(tops) <= top + 1
    if echo:
        assert text.startswith("a🙂 né 한") and logprobs["token_logprobs"][0] is None
    # each whole-character token stands at its offset
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if not token.startswith("bytes:") and not token.startswith("<|"):
            assert text[offset:].lstrip("\ufffd").startswith(token)  # U+FFFD: a character that this token cut short


def test_d21_chat_logprobs_need_no_number_of_alternatives_and_their_bytes_are_the_text(cluster):
    for options in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 5}):
        reply = cluster.post("/v1/chat/completions", asked("chat", "🙂", **options))
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        content = choice["logprobs"]["content"]
        data = bytes(b for entry in content for b in entry["bytes"])
        assert data.decode(errors="replace") == choice["message"]["content"]
        assert all(len(entry["top_logprobs"]) == options.get("top_logprobs", 0) for entry in content)


# --------------------------------------------------------------------------------------------------------- the document


@pytest.mark.soak
def test_the_description_holds_on_real_workers_too(cluster, model):
    came = hold_to_its_description(cluster.base_url, 15)
    assert {200, 400} <= set(came["POST /v1/completions"])
    until(lambda: cluster.ready()["status"] == "ready", 10, cluster.ready)
    canary(cluster, model, 8001)
