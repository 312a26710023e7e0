"""The receipt: asked for by header or field, told in a header or, of a stream, in a comment before its last event."""

import asyncio
import json

import pytest
from ingress_fakes import ids_of, serving

from tailrace.router.flow import Stamps
from tailrace.router.receipt import MAX_ENTRIES, ttft_parts
from tailrace.transfer.messages import Fail

HEADER = "x-tailrace-receipt"
TEXT = " one two three four"

pytestmark = pytest.mark.asyncio


async def lines_of(api, **body) -> list[str]:
    async with api.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, **body}) as response:
        assert HEADER not in response.headers
        return [line async for line in response.aiter_lines() if line]


async def test_it_is_told_only_if_asked_for_and_names_workers_attempt_and_times():
    async with serving(lambda prompt, sample: ids_of(TEXT)) as api:
        plain = await api.complete(prompt="a", max_tokens=3)
        assert HEADER not in plain.headers
        assert not any(HEADER in line for line in await lines_of(api, max_tokens=3))
        for no in ("", "0", "false"):
            reply = await api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={HEADER: no})
            assert HEADER not in reply.headers
        asked = await api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers={HEADER: "1"})
        (told,) = json.loads(asked.headers[HEADER])
        assert (told["ctx"], told["gen"], told["attempt"]) == ("ctx-0", "gen-0", 1)
        parts = told["ttft_s"]
        assert parts.pop("whole") <= sum(parts.values()) + 1e-4 and parts["prefill"] == 0.002
        assert asked.json() | {"id": 0, "created": 0} == plain.json() | {"id": 0, "created": 0}
        chat = await api.chat(max_tokens=1, receipt=True)
        assert json.loads(chat.headers[HEADER])[0]["gen"] in (None, "gen-0")


async def test_a_stream_tells_it_in_a_comment_before_its_last_event():
    async with serving(lambda prompt, sample: ids_of(TEXT)) as api:
        lines = await lines_of(api, max_tokens=3, receipt=True)
        assert lines[-1] == "data: [DONE]" and lines[-2].startswith(f": {HEADER} [")
        (told,) = json.loads(lines[-2].removeprefix(f": {HEADER} "))
        assert told["ctx"] == "ctx-0" and told["wire_bytes"] == 0
        api.cluster.gen.stop_after = 2
        reading = asyncio.create_task(lines_of(api, receipt=True, timeout_s=0.4))
        lines = await reading
        assert '"error"' in lines[-1] and lines[-2].startswith(f": {HEADER} [")


async def test_a_later_attempt_is_told_without_the_split():
    async with serving(lambda prompt, sample: ids_of(TEXT)) as api:
        api.cluster.ctx.fail_next = Fail("", 1, "out_of_pages", "full", True)
        reply = await api.complete(prompt="a", max_tokens=2, receipt=True)
        (told,) = json.loads(reply.headers[HEADER])
        assert told["attempt"] == 2 and list(told["ttft_s"]) == ["whole"]


async def test_a_batch_has_an_entry_for_each_of_its_first_prompts():
    async with serving(lambda prompt, sample: ids_of(TEXT)) as api:
        for count in (3, 20):
            reply = await api.complete(prompt=["a"] * count, max_tokens=1, receipt=True)
            assert len(json.loads(reply.headers[HEADER])) == min(count, MAX_ENTRIES)


async def test_before_the_first_token_there_is_no_split():
    assert ttft_parts(Stamps(began=1.0), 0.5) == {}
    assert ttft_parts(Stamps(began=1.0, first_token=3.0), 0.5) == {"whole": 2.5}


async def test_the_parts_add_up_to_the_whole():
    stamps = Stamps(began=1.0, placed=1.25, first_token=3.0, worker={"queue": 0.25, "prefill": 1.0})
    parts = ttft_parts(stamps, 0.5)
    assert parts == {"whole": 2.5, "tokenize": 0.5, "place": 0.25, "queue": 0.25, "prefill": 1.0, "wire": 0.5}


async def test_a_first_token_of_gen_has_its_replay_as_a_part():
    worker = {"queue": 0.25, "prefill": 0.5, "replay": 0.5}
    parts = ttft_parts(Stamps(began=1.0, placed=1.25, first_token=3.0, worker=worker), 0.5)
    assert (parts["replay"], parts["wire"]) == (0.5, 0.5) and sum(parts.values()) == 2 * parts["whole"]
