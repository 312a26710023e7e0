"""A small client of our own HTTP API, for `tailrace serve`, `chat` and `status`. Knows the API's public face only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tailrace.model.errors import ConfigError, PeerError

CONNECT_S = 2.0
Samples = dict[str, list[tuple[dict[str, str], float]]]


class Client:
    """One server. Every method raises PeerError if it is not there or answers with an error.

    Raises:
        ConfigError: `url` is none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S), trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url}: {error}") from None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ready(self) -> tuple[str, list[str]]:
        """(`ready`, `degraded` or `unready`, reasons); `unready` also while nothing answers yet."""
        try:
            answer = self._http.get("/ready", timeout=CONNECT_S)
            body = answer.json()
            return str(body["status"]), [str(reason) for reason in body["reasons"]]
        except httpx.HTTPError as error:
            return "unready", [f"{self.url} does not answer: {error}"]
        except (ValueError, KeyError, TypeError):
            return "unready", [f"{self.url} answers, but not as an ingress of ours yet"]

    def cluster(self) -> dict[str, Any]:
        """What /cluster says."""
        try:
            answer = self._http.get("/cluster", timeout=10)
            answer.raise_for_status()
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise PeerError(f"{self.url}/cluster: {error}") from None
        if not isinstance(body, dict) or "pools" not in body:
            raise PeerError(f"{self.url}/cluster answers, but not as a router or an ingress of ours")
        return body

    def metrics(self) -> Samples:
        """What /metrics says: sample name -> ((labels, value), ...)."""
        try:
            answer = self._http.get("/metrics", timeout=10)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise PeerError(f"{self.url}/metrics: {error}") from None
        samples: Samples = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return samples

    def chat(self, messages: list[dict[str, str]], **options: Any) -> str:
        """The whole answer to a conversation."""
        body = {"messages": messages, **options}
        try:
            answer = self._http.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise PeerError(f"{self.url}: {error}") from None
        if answer.status_code != 200:
            raise PeerError(f"{self.url} answered {answer.status_code}: {_reason(answer)}")
        return answer.json()["choices"][0]["message"]["content"]

    def stream_chat(self, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """The answer's text, piece by piece."""
        body = {"messages": messages, "stream": True, **options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise PeerError(f"{self.url} answered {answer.status_code}: {_reason(answer)}")
                yield from _pieces(answer.iter_lines())
        except httpx.HTTPError as error:
            raise PeerError(f"{self.url}: {error}") from None


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise PeerError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                yield piece
    raise PeerError("the stream ended early")


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
