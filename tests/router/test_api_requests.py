"""What the API refuses and what it accepts: design 9's table, cases D3, D9, D10, D11, D14, D15, D16, D17, B24."""

import asyncio
import json

import pytest
import pytest_asyncio
from ingress_fakes import ids_of, serving, smollm2

from tailrace.transfer.messages import Place, Submit, unpack_ids

LIMIT = 512
VOCAB = 49152


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def api():
    async with serving(lambda prompt, sample: ids_of(" one two three four five six"), max_request_tokens=LIMIT) as api:
        yield api


pytestmark = pytest.mark.asyncio(loop_scope="module")


def error_of(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def refused(api, param, path="/v1/completions", status=400, **body):
    """The answer names the field, and nothing went to the cluster."""
    before = len(api.cluster.of(Place))
    response = await api.http.post(path, content=json.dumps(body))
    error = error_of(response, status)
    assert error["param"] == param, error
    if param is not None and status == 400:
        assert param in error["message"]
    assert len(api.cluster.of(Place)) == before
    return error


async def submitted(api, **body):
    response = await api.complete(**body)
    assert response.status_code == 200, response.text
    return api.cluster.ctx.of(Submit)[-1], response.json()


# --------------------------------------------------------------------------------------------------------- the body


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "a"', b'{"prompt": "a"} x', b"\xff\xfe", b'{"a": "\\ud800"}'])
async def test_malformed_json_is_400(api, body):
    response = await api.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("body", ["[]", '"a"', "3", "null", "true"])
async def test_a_body_that_is_no_object_is_400(api, body):
    response = await api.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert "JSON object" in error_of(response)["message"]


async def test_deeply_nested_json_is_400(api):
    response = await api.http.post("/v1/completions", content=b'{"prompt": ' + b"[" * 100_000)
    error_of(response)


async def test_the_wrong_content_type_is_415_and_none_is_taken_as_json(api):
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        error_of(await api.http.post("/v1/completions", content=body, headers={"content-type": kind}), 415)
    for headers in ({"content-type": "application/json; charset=utf-8"}, {}):
        assert (await api.http.post("/v1/completions", content=body, headers=headers)).status_code == 200
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(await api.http.post("/v1/completions", content=body, headers=packed), 415)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_50_mb_is_413(api, chunked):
    data = b'{"prompt": "' + b"a" * 50_000_000 + b'"}'

    async def parts():
        for i in range(0, len(data), 1 << 20):
            yield data[i : i + (1 << 20)]

    content = parts() if chunked else data
    response = await api.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "16777216" in error_of(response, 413)["message"]
    assert (await api.complete(prompt="a", max_tokens=1)).status_code == 200


async def test_unknown_paths_and_methods_have_the_error_object_too(api):
    error_of(await api.http.get("/v1/nothing"), 404)
    error_of(await api.http.get("/v1/completions"), 405)


# ----------------------------------------------------------------------------------------------------- types and bounds


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", True), ("max_tokens", -1), ("max_tokens", [1]),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"), ("temperature", -0.1),
        ("temperature", 2.5), ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5),
        ("min_p", -1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("n", 0),
        ("n", 129), ("n", "1"), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.5), ("stream", 1), ("echo", "yes"),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("min_tokens", -1), ("ignore_eos", 0),
        ("stop", ""), ("stop", [""]), ("stop", ["a", ""]), ("stop", 7), ("stop", ["a", 7]), ("stop", ["x"] * 17),
        ("stop_token_ids", 7), ("stop_token_ids", ["7"]), ("stop_token_ids", [1.0]), ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [VOCAB + 1]), ("stop_token_ids", [-1]), ("stop_token_ids", [2**63]),
        ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"7": 101}), ("logit_bias", {"7": "1"}),
        ("logit_bias", {str(VOCAB): 1}), ("logit_bias", {str(VOCAB + 1): 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(2**63): 1}), ("logit_bias", {"7": float("nan")}), ("logit_bias", {"9" * 5000: 1}),
        ("model", 5), ("stream_options", 5), ("stream_options", []), ("priority", "high"), ("priority", 2**31),
        ("cache_salt", 5), ("timeout_s", 0), ("timeout_s", "5"), ("conversation_id", 5), ("conversation_id", ""),
        ("best_of", 2), ("best_of", 0), ("suffix", "x"), ("user", 5), ("response_format", "text"),
    ],
)  # fmt: skip
async def test_a_wrong_value_is_400_naming_the_field(api, field, value):
    await refused(api, field, prompt="a", **{field: value})


@pytest.mark.parametrize(
    "prompt, param",
    [
        ("", "prompt"), ([""], "prompt"), ([], "prompt"), ([[]], "prompt"), ([[1], []], "prompt"),
        ([[1], "a"], "prompt"),
        (["a", [1]], "prompt"), (["a", 1], "prompt"), (["7", 7], "prompt"), ([7, "7"], "prompt"), ([True], "prompt"),
        ([1.0], "prompt"), (7, "prompt"), ({"a": 1}, "prompt"), ([VOCAB], "prompt"), ([VOCAB + 1], "prompt"),
        ([-1], "prompt"), ([2**63], "prompt"), ([[1], [VOCAB]], "prompt[1]"), (None, "prompt"),
    ],
)  # fmt: skip
async def test_a_wrong_prompt_is_400(api, prompt, param):
    await refused(api, param, prompt=prompt)


async def test_prompts_of_ids_and_batches_keep_their_order(api):
    for prompt, texts in (([0], 1), ([0, 0], 1), ([[0], [1, 2]], 2), (["a", "b"], 2)):
        before = len(api.cluster.ctx.of(Submit))
        response = await api.complete(prompt=prompt, max_tokens=2)
        assert [c["index"] for c in response.json()["choices"]] == list(range(texts))
        sent = [unpack_ids(s.prompt_ids) for s in api.cluster.ctx.of(Submit)[before:]]
        one = [prompt] if isinstance(prompt[0], int) else prompt
        assert sent == [ids_of(p) if isinstance(p, str) else p for p in one]


@pytest.mark.parametrize("stop", [None, []])
async def test_no_stop_strings_is_as_if_absent(api, stop):
    _, answer = await submitted(api, prompt="a", stop=stop, max_tokens=3)
    assert answer["choices"][0]["text"] == " one two three"


async def test_null_is_absent_for_every_optional_field(api):
    from tailrace.router.api_types import ChatBody, CompletionBody

    for kind, path, needed in (
        (CompletionBody, "/v1/completions", {"prompt": "a"}),
        (ChatBody, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "name": None}]}),
    ):
        body = dict.fromkeys(kind.model_fields) | needed
        response = await api.http.post(path, json=body)
        assert response.status_code == 200, response.text
        submit = api.cluster.ctx.of(Submit)[-1]
        assert submit.params.temperature == 1.0 and submit.params.max_tokens == LIMIT - len(
            unpack_ids(submit.prompt_ids)
        )


async def test_choices_are_bounded(api):
    await refused(api, "n", prompt=["a"] * 100, n=100)
    await refused(api, "prompt", prompt=["a"] * 1025)


async def test_unknown_fields_are_ignored_and_never_reach_a_worker(api):
    inside = {"peer": "x", "session": "y", "page_ids": [1], "kv_transfer_params": {"a": 1}}
    response = await api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "grüße": 1, **inside})
    assert response.status_code == 200
    assert not any(word in repr(api.cluster.ctx.frames[-1]) for word in inside)


async def test_sampling_parameters_reach_the_worker_as_sent(api):
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "max_tokens": 4,
    }  # fmt: skip
    submit, _ = await submitted(
        api, prompt="a", seed=-5, stop_token_ids=[9, 9], logit_bias={"3": -100, "4": 2}, priority=3, n=2, **given
    )
    assert {name: getattr(submit.params, name) for name in given} == given
    assert submit.params.seed == 2**64 - 5 and submit.params.stop_token_ids == (9,)
    assert submit.params.logit_bias == ((3, -100.0), (4, 2.0)) and (submit.priority, submit.samples) == (3, 2)
    assert type(submit.params.presence_penalty) is float


async def test_an_unset_seed_is_drawn_here_and_differs(api):
    seeds = {(await submitted(api, prompt="a", max_tokens=1))[0].params.seed for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= seed < 2**64 for seed in seeds)


async def test_top_k_minus_one_is_off(api):
    assert (await submitted(api, prompt="a", max_tokens=1, top_k=-1))[0].params.top_k == 0


# ----------------------------------------------------------------------------------------------------------- length


async def test_the_limit_is_the_room_for_prompt_and_output_together(api):
    _, answer = await submitted(api, prompt=[5] * (LIMIT - 1))
    assert answer["usage"]["completion_tokens"] == 1 and answer["choices"][0]["finish_reason"] == "length"
    for num_tokens in (LIMIT, LIMIT + 1, 10 * LIMIT):
        error = await refused(api, "prompt", prompt=[5] * num_tokens)
        assert str(num_tokens) in error["message"] and str(LIMIT) in error["message"]
        assert error["code"] == "context_length_exceeded"
    error = await refused(api, "max_tokens", prompt=[5] * 10, max_tokens=LIMIT - 9)
    assert all(str(number) in error["message"] for number in (10, LIMIT - 9, LIMIT))
    await refused(api, "max_tokens", prompt=[5], max_tokens=10**12)
    assert (await submitted(api, prompt=[5] * 10, max_tokens=LIMIT - 10))[0].params.max_tokens == LIMIT - 10


async def test_a_text_over_the_limit_is_refused_quickly_however_long_it_is(api):
    for repeats in (LIMIT, 10 * LIMIT, 400_000, 2_000_000):
        started = asyncio.get_running_loop().time()
        error = await refused(api, "prompt", prompt=" word" * repeats)
        assert str(LIMIT) in error["message"]
        assert asyncio.get_running_loop().time() - started < 1.0
    response = await api.chat(messages=[{"role": "user", "content": " word" * 10 * LIMIT}])
    assert error_of(response)["param"] == "messages"


async def test_min_tokens_may_not_pass_max_tokens(api):
    await refused(api, "min_tokens", prompt="a", min_tokens=3, max_tokens=2)
    await refused(api, "min_tokens", prompt="a", min_tokens=LIMIT)


async def test_the_routers_smaller_limit_is_taken_over(api):
    api.cluster.answers["ready"] = json.dumps({"status": "ready", "reasons": [], "max_request_tokens": 100})
    try:
        for _ in range(60):
            if api.service.limits.max_request_tokens == 100:
                break
            await asyncio.sleep(0.05)
        assert "100" in (await refused(api, "prompt", prompt=[5] * 100))["message"]
    finally:
        api.cluster.answers["ready"] = json.dumps({"status": "ready", "reasons": [], "max_request_tokens": LIMIT})
        while api.service.limits.max_request_tokens != LIMIT:
            await asyncio.sleep(0.05)


# --------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"), (None, "messages"), ("hi", "messages"), ([5], "messages[0]"), ([{}], "messages[0].role"),
        ([{"role": "king", "content": "a"}], "messages[0].role"), ([{"role": 5}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": ["a"]}], "messages[1].content"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ],
)  # fmt: skip
async def test_wrong_messages_are_400(api, messages, param):
    await refused(api, param, "/v1/chat/completions", messages=messages)


async def test_an_image_part_is_400_naming_the_type(api):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    content = [{"type": "text", "text": "a"}, part]
    error = await refused(
        api, "messages[0].content", "/v1/chat/completions", messages=[{"role": "user", "content": content}]
    )
    assert "image_url" in error["message"]


async def test_text_parts_are_joined_and_none_is_empty(api):
    whole = await api.chat(messages=[{"role": "user", "content": "ab"}], max_tokens=1)
    first = api.cluster.ctx.of(Submit)[-1].prompt_ids
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (await api.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)).status_code == 200
    assert api.cluster.ctx.of(Submit)[-1].prompt_ids == first and whole.status_code == 200
    assert (await api.chat(messages=[{"role": "user", "content": []}], max_tokens=1)).status_code == 200


async def test_the_chat_template_is_applied_without_a_second_bos(api):
    await api.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    text = smollm2().tokenizer.decode(unpack_ids(api.cluster.ctx.of(Submit)[-1].prompt_ids), skip_special=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_max_completion_tokens_replaces_max_tokens(api):
    assert (await api.chat(max_completion_tokens=2)).json()["usage"]["completion_tokens"] == 2
    assert (await api.chat(max_completion_tokens=2, max_tokens=2)).json()["usage"]["completion_tokens"] == 2
    error = error_of(await api.chat(max_completion_tokens=2, max_tokens=3))
    assert error["param"] == "max_tokens"
    assert error_of(await api.chat(max_tokens=0))["param"] == "max_tokens"


@pytest.mark.parametrize(
    "field, value",
    [
        ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}), ("top_logprobs", 2), ("top_logprobs", 21),
        ("logprobs", 1),
    ],
)  # fmt: skip
async def test_what_is_not_there_yet_or_makes_no_sense_is_400_naming_it(api, field, value):
    assert error_of(await api.chat(**{field: value}))["param"] == field


async def test_empty_tools_and_text_format_are_fine(api):
    response = await api.chat(tools=[], response_format={"type": "text"}, max_tokens=1, logprobs=True)
    assert response.status_code == 200 and response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_stream_options_without_a_stream_are_ignored(api):
    response = await api.complete(prompt="a", max_tokens=1, stream=False, stream_options={"include_usage": True})
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 1


# ----------------------------------------------------------------------------------------------------- names and heads


async def test_the_model_may_be_absent_or_the_served_one(api):
    assert (await api.complete(prompt="a", max_tokens=1, model="smollm2")).status_code == 200
    error = await refused(api, "model", status=404, prompt="a", model="gpt-4")
    assert error["code"] == "model_not_found" and "gpt-4" in error["message"]
    assert (await api.http.get("/v1/models/smollm2")).json()["id"] == "smollm2"
    error_of(await api.http.get("/v1/models/other/one"), 404)
    (model,) = (await api.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("smollm2", "model", LIMIT)


@pytest.mark.parametrize(
    "sent, given_back",
    [
        (b"plain-1", "plain-1"), (b"a/b_c-0", "a/b_c-0"), (b"x" * 300, "x" * 128), ("grüße".encode(), "gre"),
        (b"a b\tc", "abc"), (b"", None),
    ],
)  # fmt: skip
async def test_request_ids_of_clients_are_cleaned_given_back_and_used_for_nothing(api, sent, given_back):
    response = await api.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=[(b"x-request-id", sent)]
    )
    own = response.headers["x-request-id"]
    assert own == given_back if given_back is not None else len(own) == 32
    assert response.json()["id"].startswith("cmpl-") and own not in response.json()["id"]
    internal = api.cluster.ctx.of(Submit)[-1].request
    assert len(internal) == 32 and int(internal, 16) and internal not in response.text


async def test_equal_request_ids_do_not_meet(api):
    headers = {"x-request-id": "same"}
    both = await asyncio.gather(
        *(api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers=headers) for _ in range(2))
    )
    assert [r.json()["choices"][0]["text"] for r in both] == [" one two three"] * 2


async def test_tenant_salt_and_model_keep_pages_apart(api):
    prompt = "word " * 40

    async def place(headers=None, **body):
        await api.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body}, headers=headers)
        return api.cluster.of(Place)[-1]

    plain, again = await place(), await place()
    assert plain.hashes and (plain.hashes, plain.namespace) == (again.hashes, again.namespace)
    others = [await place({"x-tenant": "x"}), await place({"x-tenant": "y"}), await place(cache_salt="x")]
    assert len({p.hashes for p in [plain, *others]}) == 4 and len({p.namespace for p in [plain, *others]}) == 4
    assert others[0].tenant == "x" and plain.tenant == ""


async def test_conversations_come_from_header_or_body(api):
    await api.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-conversation-id": "from head"}
    )
    assert api.cluster.of(Place)[-1].conversation == "from head"
    await submitted(api, prompt="a", max_tokens=1, conversation_id="from body")
    assert api.cluster.of(Place)[-1].conversation == "from body"
    long = {"x-tenant": "t" * 129}
    error_of(await api.http.post("/v1/completions", json={"prompt": "a"}, headers=long))


async def test_a_deadline_travels_as_the_time_left(api):
    submit, _ = await submitted(api, prompt="a", max_tokens=1, timeout_s=9)
    assert 8.5 < submit.timeout_s <= 9 and 8.5 < api.cluster.of(Place)[-1].deadline_s <= 9


async def test_tokenize_and_detokenize(api):
    answer = (await api.http.post("/tokenize", json={"prompt": "Hello 😀", "return_token_strs": True})).json()
    assert answer["tokens"] == ids_of("Hello 😀") and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == LIMIT and "Hello" in answer["token_strs"]
    back = (await api.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": "Hello 😀"}
    chat = (await api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})).json()
    assert (
        "<|im_start|>user\nHi" in (await api.http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    )
    error_of(await api.http.post("/tokenize", json={}))
    error_of(await api.http.post("/tokenize", json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]}))
    error_of(await api.http.post("/detokenize", json={"tokens": [VOCAB]}))
    error_of(await api.http.post("/detokenize", json={"tokens": ["7"]}))


async def test_health_ready_metrics_and_cluster(api):
    assert (await api.http.get("/health")).json() == {"status": "ok"}
    ready = await api.http.get("/ready")
    assert ready.status_code == 200 and ready.json()["status"] == "ready"
    before = api.cluster.answers["ready"]
    api.cluster.answers["ready"] = '{"status": "unready", "reasons": ["no gen"]}'
    assert (await api.http.get("/ready")).status_code == 503
    api.cluster.answers["ready"] = before
    metrics = await api.http.get("/metrics")
    assert metrics.text == "m 1\n" and metrics.headers["content-type"].startswith("text/plain")
    assert (await api.http.get("/cluster")).json() == {}


async def test_nothing_is_left(api):
    await api.quiet()


async def test_prompt_logprobs_are_refused_where_no_worker_computes_a_prompt_through_all_layers():
    """handoff_mode bounded_replay_on_generation; the prompt's text and the output's logprobs are as ever."""
    async with serving(lambda prompt, sample: ids_of(" one two"), policy={"left_to_gen": 4}) as api:
        error = await refused(api, "logprobs", prompt="a b", echo=True, logprobs=1)
        assert "handoff_mode bounded_replay_on_generation" in error["message"]
        assert (await refused(api, "logprobs", prompt="a b", echo=True, logprobs=0, max_tokens=0))[
            "param"
        ] == "logprobs"
        for body in ({"echo": True}, {"logprobs": 1}):
            submit, _ = await submitted(api, prompt="a b", max_tokens=2, **body)
            assert submit.left_to_gen == 4 and submit.params.prompt_logprobs is None
