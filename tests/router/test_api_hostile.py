"""Slow and hostile clients: heads and bodies that do not come, are huge, nested, compressed, or are no HTTP at all."""

import asyncio
import json
import time

import pytest
import pytest_asyncio
from ingress_fakes import ids_of, serving

from tailrace.router import http_exchange
from tailrace.router.http_limits import MAX_HEAD_BYTES, LimitedProtocol
from tailrace.transfer.messages import Place

TEXT = " one two three four"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def api():
    async with serving(lambda prompt, sample: ids_of(TEXT)) as api:
        yield api


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def connect(api):
    return await asyncio.open_connection("127.0.0.1", int(api.url.rsplit(":", 1)[1]))


async def answers(reader) -> list[tuple[int, dict]]:
    """Everything that comes until the server closes, as (status, JSON)."""
    data, out = await asyncio.wait_for(reader.read(), 10), []
    while data:
        head, data = data.split(b"\r\n\r\n", 1)
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        out.append((int(head.split()[1]), json.loads(data[:length])))
        data = data[length:]
    return out


async def sent(api, data: bytes) -> list[tuple[int, dict]]:
    reader, writer = await connect(api)
    writer.write(data)
    try:
        return await answers(reader)
    finally:
        writer.close()


async def still_serves(api):
    response = await api.complete(prompt="a", max_tokens=2)
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == " one two"
    await api.quiet()


def request(body: bytes, more: bytes = b"connection: close\r\n") -> bytes:
    return HEAD + more + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_a_head_that_trickles_is_given_up_and_others_are_served_meanwhile(api, monkeypatch):
    monkeypatch.setattr(LimitedProtocol, "head_s", 0.5)
    clients = [await connect(api) for _ in range(20)]
    for _, writer in clients:
        writer.write(HEAD)
    started = time.monotonic()
    await asyncio.sleep(0.1)
    for _, writer in clients:  # now: what is sent to a closed connection would take the answer along
        writer.write(b"x-a: b\r\n")
    await still_serves(api)
    for reader, writer in clients:
        ((status, body),) = await answers(reader)
        assert status == 408 and body["error"]["type"] == "invalid_request_error"
        writer.close()
    assert time.monotonic() - started < 5
    reader, writer = await connect(api)  # says nothing at all
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_request_may_take_longer_than_its_head(api, monkeypatch):
    monkeypatch.setattr(LimitedProtocol, "head_s", 0.2)
    api.cluster.ctx.gate.clear()
    asked = asyncio.create_task(sent(api, request(b'{"prompt": "a", "max_tokens": 1}')))
    await asyncio.sleep(0.6)
    api.cluster.ctx.gate.set()
    assert (await asked)[0][0] == 200


async def test_a_body_that_stops_coming_is_given_up(api, monkeypatch):
    monkeypatch.setattr(http_exchange, "BODY_PART_S", 0.3)
    reader, writer = await connect(api)
    writer.write(HEAD + b"content-length: 100\r\nconnection: close\r\n\r\n" + b'{"prompt"')
    ((status, body),) = await answers(reader)
    assert status == 408 and "body" in body["error"]["message"]
    writer.close()
    await still_serves(api)


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"a" * (2 * MAX_HEAD_BYTES) + b"\r\n",
        b"".join(b"x-%d: %s\r\n" % (i, b"a" * 100) for i in range(1000)),
        b"cookie: " + b"a" * (64 * MAX_HEAD_BYTES),  # and no end
    ],
    ids=["one header", "many headers", "no end"],
)
async def test_a_huge_head_is_refused(api, head):
    try:
        came = await sent(api, HEAD + head + b"content-length: 2\r\n\r\n{}")
    except ConnectionResetError:  # it was closed before all was sent, and the client hears no more than that
        came = []
    assert came or len(head) > MAX_HEAD_BYTES * 1.7
    for status, body in came:
        assert status == 431 and str(MAX_HEAD_BYTES) in body["error"]["message"]
    await still_serves(api)


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"HELO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100])
async def test_what_is_no_http_is_told_so_in_the_error_object(api, data):
    ((status, body),) = await sent(api, data)
    assert status == 400 and set(body["error"]) == {"message", "type", "param", "code"}
    await still_serves(api)


async def test_pipelined_requests_are_answered_in_order(api):
    bodies = [{"prompt": "a", "max_tokens": n} for n in (3, 1, 4)]
    data = [json.dumps(body).encode() for body in bodies]
    came = await sent(api, request(data[0], b"") + request(data[1], b"") + request(b"{", b"") + request(data[2]))
    assert [status for status, _ in came] == [200, 200, 400, 200]
    assert [body["usage"]["completion_tokens"] for status, body in came if status == 200] == [3, 1, 4]


async def test_a_client_that_has_sent_all_and_closes_its_half_is_cancelled(api):
    before = len(api.cluster.of(Place))
    api.cluster.ctx.gate.clear()
    reader, writer = await connect(api)
    writer.write(request(b'{"prompt": "a"}', b""))
    while len(api.cluster.of(Place)) == before:
        await asyncio.sleep(0.01)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    api.cluster.ctx.gate.set()
    writer.close()
    await still_serves(api)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": "a", "stop": [f"s{i}" for i in range(10_000)]}, "stop"),
        ({"prompt": "a", "stop": "s" * 100_000}, "stop"),
        ({"prompt": "a", "stop_token_ids": list(range(10_000))}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
        ({"prompt": "a", "cache_salt": "x" * 1000}, "cache_salt"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
    ],
    ids=["stops", "long stop", "stop ids", "biases", "salt", "prompts"],
)
async def test_too_much_of_anything_is_refused_at_once(api, body, param):
    started = time.monotonic()
    response = await api.complete(**body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("inside", ["tools", "response_format", "metadata", "messages", "stop"])
@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
async def test_nesting_without_end_is_a_400_or_is_ignored(api, inside, opening, closing):
    for depth in (100, 190, 1000, 100_000):
        value = opening * depth + "1" + closing * depth
        text = f'{{"prompt": "a", "max_tokens": 1, "{inside}": {value}}}'
        response = await api.http.post("/v1/completions", content=text)
        assert response.status_code in (200, 400), (depth, response.text)
    await still_serves(api)


async def test_of_a_key_given_twice_the_last_counts_as_json_readers_do(api):
    response = await api.http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1, "max_tokens": 3}')
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_nul_characters_are_text_and_lone_surrogates_are_no_json(api):
    for text in (b'"a\\u0000b"', b'"\\u0000"'):
        response = await api.http.post(
            "/v1/completions", content=b'{"max_tokens": 1, "echo": true, "prompt": %s}' % text
        )
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == json.loads(text) + " one"
    for text in (b'"\\ud800"', b'"\\udc00x"', b'"\xed\xa0\x80"', b'"\xff"'):
        response = await api.http.post("/v1/completions", content=b'{"max_tokens": 1, "prompt": %s}' % text)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"
    whole = await api.http.post("/v1/completions", content=b'{"max_tokens": 1, "prompt": "\\ud83d\\ude00"}')
    assert whole.status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity", "x"])
async def test_compressed_bodies_are_415(api, coding):
    body = json.dumps({"prompt": "a"})
    response = await api.http.post("/v1/completions", content=body, headers={"content-encoding": coding})
    assert response.status_code == 415 and coding[:4] in response.json()["error"]["message"]


async def test_odd_headers_end_nothing(api):
    for more in (
        b"x-tenant: \xff\xfe\r\n", b"content-length: 2\r\ncontent-length: 3\r\n", b"authorization: \xe2\x98\x83\r\n",
        b"transfer-encoding: chunked, chunked\r\n", b"expect: 100-continue\r\n", b"upgrade: websocket\r\n",
        b"x-request-id: \x01\r\n", b"x-conversation-id: " + b"c" * 300 + b"\r\n",
    ):  # fmt: skip
        reader, writer = await connect(api)
        writer.write(HEAD + more + b'connection: close\r\ncontent-length: 32\r\n\r\n{"prompt": "a", "max_tokens": 1}')
        writer.write_eof() if b"chunked" in more else None
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
    await still_serves(api)
