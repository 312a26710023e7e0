"""What schemathesis holds the API to, whatever it is served by."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip


def document_of(url: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/openapi.json", timeout=10)
    assert reply.status_code == 200
    return reply.json()


def hold_to_its_description(url: str, examples: int) -> dict[str, list[int]]:
    """Send each operation that many requests, right ones and wrong ones, and check the answers.

    Returns:
        The statuses that came, by operation.
    """
    schema = schemathesis.openapi.from_dict(
        document_of(url), config=schemathesis.Config.from_dict({"base-url": url, "generation": {"mode": "all"}})
    )
    return {found.ok().label: _hold(found.ok(), examples) for found in schema.get_all_operations()}


def _hold(operation: Any, examples: int) -> list[int]:
    statuses: list[int] = []
    modes = [schemathesis.GenerationMode.POSITIVE]
    if operation.body:
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @settings(max_examples=examples if operation.body else 4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def check(case: Any) -> None:
        response = case.call(timeout=30)
        statuses.append(response.status_code)
        assert response.status_code != 500, response.text  # 503 and 504 are what some requests ask for
        case.validate_response(response, checks=CHECKS)

    check()
    return statuses
