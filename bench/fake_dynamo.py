"""A trivial worker for Dynamo's frontend: what router.py holds it against. Runs in an environment that has ai-dynamo.

    PYTHON bench/fake_dynamo.py MODEL_FOLDER NAME

Takes token ids, gives one fixed id a token, all at once; found through Dynamo's own discovery (set by its environment
variables). Nothing of this project is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model  # pyright: ignore[reportMissingImports]
from dynamo.runtime import DistributedRuntime, dynamo_worker  # pyright: ignore[reportMissingImports]

TOKEN = 1000


async def generate(request: Any, context: Any = None) -> AsyncIterator[dict[str, Any]]:
    count = int(request["stop_conditions"].get("max_tokens") or 8)
    for i in range(count):
        yield {"token_ids": [TOKEN]} if i < count - 1 else {"token_ids": [TOKEN], "finish_reason": "length"}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("bench.backend.generate")
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, sys.argv[1], sys.argv[2],
        worker_type=WorkerType.Aggregated, ignore_weights=True,
    )  # fmt: skip
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main())  # pyright: ignore[reportCallIssue]
