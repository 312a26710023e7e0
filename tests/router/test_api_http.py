"""The HTTP around the API: methods, origins of browsers, and the error object whatever is wrong."""

import pytest
import pytest_asyncio
from ingress_fakes import ids_of, serving

from tailrace.router import http_app

ORIGIN = "https://chat.example.org"
CORS = "access-control-allow-origin"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def api():
    async with serving(lambda prompt, sample: ids_of(" one two three"), cors_origins=(ORIGIN,)) as api:
        yield api


pytestmark = pytest.mark.asyncio(loop_scope="module")


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_page_of_an_allowed_origin_may_call_the_api_and_read_its_headers(api):
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-tenant"}
    preflight = await api.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200 and preflight.headers[CORS] == ORIGIN
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-tenant" in preflight.headers["access-control-allow-headers"]
    answer = await api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"origin": ORIGIN})
    assert answer.status_code == 200 and answer.headers[CORS] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = await api.http.post("/v1/completions", json={"prompt": ""}, headers={"origin": ORIGIN})
    assert refused.headers[CORS] == ORIGIN and error_of(refused, 400)["param"] == "prompt"
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    async with api.http.stream("POST", "/v1/completions", json=body, headers={"origin": ORIGIN}) as stream:
        assert stream.headers[CORS] == ORIGIN
        await stream.aread()


async def test_a_page_of_another_origin_is_refused(api):
    for asked in (
        {"origin": "https://evil.example.org", "access-control-request-method": "POST"},
        {"origin": ORIGIN, "access-control-request-method": "DELETE"},
    ):
        preflight = await api.http.options("/v1/chat/completions", headers=asked)
        assert error_of(preflight, 400)["code"] == "cors"
        assert preflight.headers.get(CORS, ORIGIN) == ORIGIN
    answer = await api.http.get("/health", headers={"origin": "https://evil.example.org"})
    assert answer.status_code == 200 and CORS not in answer.headers


async def test_any_origin_may_be_allowed():
    async with serving(lambda prompt, sample: ids_of(" one"), cors_origins=("*",)) as api:
        answer = await api.http.get("/v1/models", headers={"origin": "https://who.example.org"})
        assert answer.headers[CORS] == "*" and "access-control-allow-credentials" not in answer.headers


async def test_without_origins_there_are_no_cors_headers():
    async with serving(lambda prompt, sample: ids_of(" one")) as api:
        asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
        preflight = await api.http.options("/v1/completions", headers=asked)
        assert preflight.status_code == 204 and preflight.headers["allow"] == "POST, OPTIONS"
        assert CORS not in preflight.headers
        assert CORS not in (await api.http.get("/health", headers={"origin": ORIGIN})).headers


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/smollm2", "/health", "/ready", "/metrics", "/cluster"])
async def test_head_is_get_without_the_body(api, path):
    whole, head = await api.http.get(path), await api.http.head(path)
    assert head.status_code == whole.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(whole.content)) and len(whole.content) > 0
    assert (await api.http.options(path)).headers["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/", 404), ("GET", "/v1", 404), ("GET", "/v1/models/", 404), ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/completions", 405), ("HEAD", "/tokenize", 405), ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/chat/completions", 405), ("POST", "/health", 405), ("PATCH", "/nothing", 404),
        ("OPTIONS", "/nothing", 404),
    ],
)  # fmt: skip
async def test_unknown_paths_and_methods_are_told_in_the_error_object(api, method, path, status):
    response = await api.http.request(method, path, headers={"x-request-id": "mine"})
    assert response.status_code == status and response.headers["x-request-id"] == "mine"
    if method != "HEAD":
        assert error_of(response, status)["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert (response.headers.get("allow") is not None) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_bug_of_ours_is_told_as_an_error_too(path, monkeypatch):
    """Also on the paths that do not go through Starlette's routing."""
    async with serving(lambda prompt, sample: ids_of(" one")) as api:
        monkeypatch.setattr(http_app, "check_before_tokenizing", lambda body, limits: 1 / 0)
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        answer = await api.http.post(path, json=body)
        assert error_of(answer, 500)["code"] == "internal" and answer.headers["x-request-id"]
