"""What the API answers, whole and streamed: cases A18-A21 at the edge, D1, D4, D6, D8, D15, D21, n, echo, logprobs."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio
from ingress_fakes import byte_ids, fake_logprob, ids_of, serving, smollm2

from tailrace.transfer.messages import Cancel, Renew, Submit, unpack_ids

TEXT = " one two three four five six"
FAMILY = "👨‍👩‍👧 né 한글"
SCRIPTS = {"plain": ids_of(TEXT), "emoji": byte_ids(FAMILY), "broken": [*ids_of(" x"), *byte_ids("é")[:1]]}
EOS = next(iter(smollm2().eos_ids))


def outputs(prompt, sample):
    """The prompt's first word names the script; sample i of it begins i tokens later."""
    text = smollm2().tokenizer.decode(prompt, skip_special=True)
    name = next((name for name in SCRIPTS if name in text), "plain")
    return SCRIPTS[name][sample:] + ([EOS] if "eos" in text else [])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def api():
    async with serving(outputs, max_request_tokens=512) as api:
        yield api


@pytest.fixture
def client(api):
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


pytestmark = pytest.mark.asyncio(loop_scope="module")
BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def ask(path, words, **body):
    """A body for either endpoint whose prompt contains the words."""
    if path.endswith("chat/completions"):
        return {"messages": [{"role": "user", "content": words}], **body}
    return {"prompt": words, **body}


async def whole(api, path, **body):
    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer, index=0):
    choice = answer["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# ----------------------------------------------------------------------------------------------------- text and usage


@BOTH
@pytest.mark.parametrize("words", ["plain", "emoji", "broken", "plain eos", "emoji eos"])
@pytest.mark.parametrize("leg", ["prefill", "local"])
async def test_the_stream_joined_is_the_whole_text(api, path, words, leg):
    api.cluster.leg = leg
    body = ask(path, words, max_tokens=40, stream_options={"include_usage": True})
    answer = await whole(api, path, **body)
    stream = await api.events(path, **body)
    api.cluster.leg = "prefill"
    assert stream.text() == text_of(answer)
    assert stream.finish() == answer["choices"][0]["finish_reason"] == ("stop" if "eos" in words else "length")
    assert stream.chunks[-1]["usage"] == answer["usage"]
    expected = {"plain": TEXT, "emoji": FAMILY, "broken": " x\ufffd"}[words.split()[0]]
    assert text_of(answer) == expected


@BOTH
async def test_every_token_is_one_event(api, path):
    for words in ("plain", "emoji"):
        stream = await api.events(path, **ask(path, words, max_tokens=6))
        events = [c["choices"][0] for c in stream.chunks]
        opening = 1 if "chat" in path else 0
        assert len(events) == opening + 6 + 1
        assert events[-1]["finish_reason"] == "length" and all(e["finish_reason"] is None for e in events[:-1])
        assert stream.lines[-1] == "[DONE]" and stream.lines.count("[DONE]") == 1


@BOTH
@pytest.mark.parametrize("usage", [True, False, None, "absent"])
@pytest.mark.parametrize("n", [1, 2])
async def test_usage_comes_once_and_only_if_asked_for(api, path, usage, n):
    options = {} if usage == "absent" else {"stream_options": {"include_usage": usage}}
    body = ask(path, "plain", max_tokens=5, n=n)
    stream = await api.events(path, **body, **options)
    totals = [c for c in stream.chunks if c["choices"] == []]
    if usage is not True:
        assert totals == [] and not any("usage" in c for c in stream.chunks)
        return
    assert len(totals) == 1 and totals[0] is not None and stream.chunks[-1]["choices"] == []
    assert all(c["usage"] is None for c in stream.chunks[:-1])
    assert totals[0]["usage"] == (await whole(api, path, **body))["usage"]
    assert totals[0]["usage"]["completion_tokens"] == 5 * n
    prompt = unpack_ids(api.cluster.ctx.of(Submit)[-1].prompt_ids)
    assert totals[0]["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_the_limit_on_tokens_is_kept_and_for_one_token_no_gen_is_asked(api, max_tokens, ignore_eos):
    before = len(api.cluster.gen.frames)
    for stream in (False, True):
        body = {"prompt": "plain", "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        if stream:
            events = await api.events("/v1/completions", **body, stream_options={"include_usage": True})
            used, finish = events.chunks[-1]["usage"]["completion_tokens"], events.finish()
        else:
            answer = await whole(api, "/v1/completions", **body)
            used, finish = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
        assert (used, finish) == (max_tokens, "length")
    assert (len(api.cluster.gen.frames) == before) is (max_tokens == 1)


async def test_a_first_token_that_is_eos_or_a_stop_id_ends_without_text(api):
    eos_first = {"prompt": [EOS], "max_tokens": 5}
    SCRIPTS["plain"], kept = [EOS, *SCRIPTS["plain"]], SCRIPTS["plain"]
    try:
        answer = await whole(api, "/v1/completions", **eos_first)
        assert (text_of(answer), answer["choices"][0]["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == 1
        longer = await whole(api, "/v1/completions", **eos_first, ignore_eos=True)
        assert text_of(longer) == " one two three four"  # the special token has no text
        later = await whole(api, "/v1/completions", **eos_first, min_tokens=5)
        assert later["usage"]["completion_tokens"] == 5
    finally:
        SCRIPTS["plain"] = kept
    answer = await whole(api, "/v1/completions", prompt="plain", stop_token_ids=[kept[0]], max_tokens=9)
    assert (text_of(answer), answer["choices"][0]["finish_reason"]) == ("", "stop")


# ------------------------------------------------------------------------------------------------------- stop strings


@BOTH
@pytest.mark.parametrize(
    "words, stop, text",
    [
        ("plain", " four", " one two three"), ("plain", "o th", " one tw"), ("plain", [" one two three four five"], ""),
        ("plain", ["two three", "two"], " one "), ("plain", ["ee four", "e four five"], " one two thr"),
        ("plain", "seven", TEXT), ("plain", "six!", TEXT), ("emoji", "👧", "👨‍👩‍"), ("emoji", "\u200d👩", "👨"),
        ("emoji", "é 한", "👨‍👩‍👧 n"), ("emoji", "👨", ""), ("plain", " one", ""),
    ],
)  # fmt: skip
async def test_a_stop_string_ends_the_text_before_it_streamed_or_not(api, path, words, stop, text):
    body = ask(path, words, max_tokens=60, stop=stop)
    answer = await whole(api, path, **body)
    stream = await api.events(path, **body, stream_options={"include_usage": True})
    assert text_of(answer) == text == stream.text()
    found = text not in (TEXT, FAMILY)
    assert answer["choices"][0]["finish_reason"] == stream.finish() == ("stop" if found else "length")
    assert answer["usage"] == stream.chunks[-1]["usage"]


async def test_usage_counts_the_tokens_of_the_match_and_the_worker_is_stopped(api):
    before = api.cluster.gen.count(Cancel)
    answer = await whole(api, "/v1/completions", prompt="plain", max_tokens=60, stop="two three")
    assert answer["usage"]["completion_tokens"] == 3
    await api.quiet()
    assert api.cluster.gen.count(Cancel) == before + 1


async def test_a_stop_string_waits_for_min_tokens(api):
    answer = await whole(api, "/v1/completions", prompt="plain", max_tokens=60, stop="two", min_tokens=2)
    assert text_of(answer) == TEXT


# ------------------------------------------------------------------------------------------------------ several choices


@BOTH
async def test_samples_have_their_own_text_and_index(api, path):
    body = ask(path, "plain", n=3, max_tokens=2)
    answer = await whole(api, path, **body)
    assert [text_of(answer, i) for i in range(3)] == [" one two", " two three", " three four"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    stream = await api.events(path, **body)
    assert [stream.text(i) for i in range(3)] == [" one two", " two three", " three four"]
    assert [stream.finish(i) for i in range(3)] == ["length"] * 3
    assert len({s.request for s in api.cluster.ctx.of(Submit)}) == len(api.cluster.ctx.of(Submit))


async def test_a_batch_of_prompts_times_samples_is_ordered_by_prompt(api):
    body = {"prompt": ["plain", "emoji"], "n": 2, "max_tokens": 3}
    answer = await whole(api, "/v1/completions", **body)
    first, second = [text_of(answer, i) for i in (0, 1)]
    assert (first, second) == (" one two three", " two three four")
    assert answer["usage"]["completion_tokens"] == 12
    stream = await api.events("/v1/completions", **body)
    assert [stream.text(i) for i in range(4)] == [text_of(answer, i) for i in range(4)]


async def test_best_of_may_be_given_if_it_is_n(api):
    answer = await whole(api, "/v1/completions", prompt="plain", n=2, best_of=2, max_tokens=1)
    assert len(answer["choices"]) == 2


# ---------------------------------------------------------------------------------------------------- logprobs, echo


def check_text_logprobs(choice, top):
    """The laws of a completion's logprobs object against its text."""
    logprobs, text = choice["logprobs"], choice["text"]
    lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert len(lengths) == 1
    ends = [*logprobs["text_offset"][1:], len(text)]
    pieces = [text[a:b] for a, b in zip(logprobs["text_offset"], ends, strict=True)]
    assert "".join(pieces) == text and logprobs["text_offset"][0] == 0
    for token, piece, entry in zip(logprobs["tokens"], pieces, logprobs["top_logprobs"], strict=True):
        assert token.startswith("bytes:") or piece in ("", token)
        assert entry is None or max(1, top) <= len(entry) <= top + 1


@pytest.mark.parametrize("words", ["plain", "emoji"])
@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
async def test_completion_logprobs_fit_the_text(api, words, top, echo):
    body = {"prompt": f"Say {words} né", "max_tokens": 60, "logprobs": top, "echo": echo}
    answer = await whole(api, "/v1/completions", **body)
    choice = answer["choices"][0]
    check_text_logprobs(choice, top)
    prompt = ids_of(body["prompt"]) if echo else []
    script = SCRIPTS[words]
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + len(script)
    own = [fake_logprob(token, top).logprob for token in script]
    assert choice["logprobs"]["token_logprobs"][len(prompt) :] == own
    assert choice["text"] == (body["prompt"] if echo else "") + (TEXT if words == "plain" else FAMILY)
    if echo:
        assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1] == fake_logprob(prompt[1], top).logprob
        assert api.cluster.ctx.of(Submit)[-1].no_cache
    stream = await api.events("/v1/completions", **body)
    parts = [c["choices"][0]["logprobs"] for c in stream.chunks if c["choices"][0]["logprobs"]]
    joined = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    assert joined == choice["logprobs"] and stream.text() == choice["text"]


@pytest.mark.parametrize("words", ["plain", "emoji", "plain eos"])
@pytest.mark.parametrize("top", [None, 0, 1, 5])
async def test_chat_logprobs_have_the_bytes_of_the_text(api, words, top):
    extra = {} if top is None else {"top_logprobs": top}
    body = ask("chat/completions", words, max_tokens=60, logprobs=True, **extra)
    answer = await whole(api, "/v1/chat/completions", **body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert bytes(b for entry in content for b in entry["bytes"]) == text_of(answer).encode()
    assert all(len(entry["top_logprobs"]) == (top or 0) for entry in content)
    stream = await api.events("/v1/chat/completions", **body)
    streamed = [e for c in stream.chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_bytes_of_logprobs_end_where_a_stop_string_begins(api):
    body = ask("chat/completions", "plain", max_tokens=60, logprobs=True, stop="o thr")
    answer = await whole(api, "/v1/chat/completions", **body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert text_of(answer) == " one tw" and len(content) == 3 == answer["usage"]["completion_tokens"]
    assert bytes(b for entry in content for b in entry["bytes"]) == b" one tw"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_and_without_output(api, echo, max_tokens, logprobs, stream):
    before = len(api.cluster.gen.frames)
    prompt = "Sagt: né 😀!"
    body = {"prompt": prompt, "echo": echo, "max_tokens": max_tokens, "logprobs": logprobs}
    if not echo and max_tokens == 0:
        response = await api.complete(**body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
        return
    expected = (prompt if echo else "") + (" one" if max_tokens else "")
    if stream:
        events = await api.events("/v1/completions", **body)
        assert events.text() == expected and events.finish() == "length"
    else:
        answer = await whole(api, "/v1/completions", **body)
        assert text_of(answer) == expected and answer["usage"]["completion_tokens"] == max_tokens
        assert (answer["choices"][0]["logprobs"] is None) is (logprobs is None)
    assert len(api.cluster.gen.frames) == before


async def test_echo_of_ids_that_end_within_a_character_is_completed_by_the_output(api):
    emoji = byte_ids("😀")
    SCRIPTS["plain"], kept = [*emoji[2:], *ids_of(" ok")], SCRIPTS["plain"]
    try:
        body = {"prompt": [*ids_of("a"), *emoji[:2]], "max_tokens": 9, "echo": True, "logprobs": 0}
        answer = await whole(api, "/v1/completions", **body)
        assert text_of(answer) == "a😀 ok"
        check_text_logprobs(answer["choices"][0], 0)
        alone = await whole(api, "/v1/completions", **(body | {"echo": False}))
        assert text_of(alone) == "\ufffd\ufffd ok"  # these ids alone are no UTF-8
    finally:
        SCRIPTS["plain"] = kept


@BOTH
async def test_token_ids_come_if_asked_for(api, path):
    body = ask(path, "emoji eos", max_tokens=60, return_token_ids=True)
    ids = (await whole(api, path, **body))["choices"][0]["token_ids"]
    assert ids == [*SCRIPTS["emoji"], EOS]
    stream = await api.events(path, **body)
    assert [i for c in stream.chunks for i in c["choices"][0]["token_ids"]] == ids


# ----------------------------------------------------------------------------------------------------- the wire and D15


async def test_the_prefill_leg_is_built_from_what_is_known_and_gen_gets_no_submit(api):
    before = len(api.cluster.gen.frames)
    body = {
        "prompt": "plain", "max_tokens": 5, "min_tokens": 3, "n": 2, "logprobs": 1, "stop": "zzz", "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    await api.events("/v1/completions", **body)
    submit = api.cluster.ctx.of(Submit)[-1]
    assert (submit.leg, submit.samples, submit.params.max_tokens, submit.params.min_tokens) == ("prefill", 2, 5, 3)
    assert {type(f) for f in api.cluster.gen.frames[before:]} == {Renew}


async def test_lines_of_a_stream_are_utf8_and_split_only_at_newlines(api):
    SCRIPTS["plain"], kept = byte_ids("a\u2028b\u2029c\u0085d\r\n\x0b\x1ce"), SCRIPTS["plain"]
    try:
        async with api.http.stream(
            "POST", "/v1/completions", json={"prompt": "plain", "max_tokens": 40, "stream": True}
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            raw = await response.aread()
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in raw.decode().splitlines()
            if line.startswith("data: {")
        )
        assert text == "a\u2028b\u2029c\u0085d\r\n\x0b\x1ce"
    finally:
        SCRIPTS["plain"] = kept


async def test_leases_are_renewed_while_a_request_runs(api):
    api.cluster.gen.decode_gate.clear()
    task = asyncio.create_task(api.complete(prompt="plain", max_tokens=4))
    await asyncio.sleep(1.2)
    api.cluster.gen.decode_gate.set()
    assert (await task).status_code == 200
    request = api.cluster.ctx.of(Submit)[-1].request
    for worker in (api.cluster.ctx, api.cluster.gen):
        assert sum((request, 1) in f.keys for f in worker.of(Renew)) >= 2


async def test_metrics_say_what_happened(api):
    metrics = api.service.metrics
    await whole(api, "/v1/completions", prompt="plain eos", max_tokens=60)
    assert metrics.value("tailrace_requests_total", outcome="finished", reason="stop") >= 1
    assert metrics.value("tailrace_requests_total", outcome="finished", reason="length") >= 1
    names = {name for _, _, _, samples in metrics.families() for name, labels, _ in samples}
    assert {"tailrace_ttft_seconds_bucket", "tailrace_itl_seconds_count", "tailrace_active_requests"} <= names
    parts = {
        labels["part"]
        for _, _, _, samples in metrics.families()
        for name, labels, _ in samples
        if name == "tailrace_ttft_seconds_count"
    }
    assert parts == {"whole", "tokenize", "place", "queue", "prefill", "wire"}
    await api.quiet()
    assert metrics.value("tailrace_active_requests") == 0


# --------------------------------------------------------------------------------------------------- the openai client


async def test_openai_chat(client):
    answer = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "plain"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == " one two three" and answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length" and len(answer.choices[0].logprobs.content) == 3


async def test_openai_chat_stream_with_usage(client):
    stream = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "emoji"}], stream=True, n=2,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, usage, finishes = {0: "", 1: ""}, [], []
    async for chunk in stream:
        usage += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert texts[0] == FAMILY and len(usage) == 1 and finishes == ["length"] * 2


async def test_openai_completions(client):
    answer = await client.completions.create(
        model="smollm2", prompt=["plain", "emoji"], max_tokens=60, stop=[" four"], echo=True, logprobs=1
    )
    assert [c.text for c in answer.choices] == ["plain one two three", "emoji" + FAMILY]
    assert answer.choices[0].logprobs.text_offset[0] == 0
    parts = [
        chunk.choices[0].text
        async for chunk in await client.completions.create(model="smollm2", prompt="plain", max_tokens=2, stream=True)
    ]
    assert "".join(parts) == " one two"


async def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="smollm2", prompt="plain", stop="", stream=True)
    assert wrong.value.param == "stop" and wrong.value.status_code == 400
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
    assert [model.id async for model in client.models.list()] == ["smollm2"]


async def test_nothing_is_left(api):
    await api.quiet()
