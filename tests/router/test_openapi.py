"""The served description: it is the truth about every answer, whatever schemathesis makes of it."""

from __future__ import annotations

import httpx
import pytest
from api_checks import document_of, hold_to_its_description
from in_thread import served
from ingress_fakes import ids_of

from tailrace.router.api_types import ChatBody, CompletionBody
from tailrace.router.openapi import describe


@pytest.fixture(scope="module")
def url():
    with served(lambda prompt, sample: ids_of(" one two three four"), max_request_tokens=64) as url:
        yield url


def test_every_answer_is_one_of_those_described_and_none_is_a_500(url):
    came = hold_to_its_description(url, 25)
    for work in ("POST /v1/completions", "POST /v1/chat/completions"):
        assert {200, 400} <= set(came[work]), came
    assert {200, 400} <= {*came["POST /tokenize"], *came["POST /detokenize"]}, (
        came
    )  # few bodies of either are drawn right
    assert all(set(statuses) == {200} for name, statuses in came.items() if name.startswith("GET") and "{" not in name)


def test_the_document_is_served_and_names_every_field(url):
    document = document_of(url)
    assert document == describe("smollm2", keys=False, operators=True)
    bodies = document["components"]["schemas"]
    assert set(bodies["ChatBody"]["properties"]) == set(ChatBody.model_fields)
    assert set(bodies["CompletionBody"]["properties"]) == set(CompletionBody.model_fields)
    assert httpx.head(f"{url}/openapi.json").status_code == 200


def test_keys_and_the_operators_paths_are_described_where_they_are_there():
    plain, closed = (describe("m", keys=k, operators=o) for k, o in ((False, True), (True, False)))
    assert "security" not in plain and closed["security"] == [{"key": []}]
    assert {"/metrics", "/cluster"} <= set(plain["paths"]) and not {"/metrics", "/cluster"} & set(closed["paths"])
    assert closed["paths"]["/health"]["get"]["security"] == []
