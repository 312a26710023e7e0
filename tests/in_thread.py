"""The ingress before its fake cluster, in a thread of its own, for clients that block (schemathesis)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from ingress_fakes import Outputs, serving


@contextlib.contextmanager
def served(outputs: Outputs, **changes) -> Iterator[str]:
    """The URL of a served application."""
    ready, ends = threading.Event(), asyncio.Event()
    found: dict = {}

    async def serve() -> None:
        found["loop"] = asyncio.get_running_loop()
        async with serving(outputs, **changes) as api:
            found["url"] = api.url
            ready.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="served")
    thread.start()
    assert ready.wait(30)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(ends.set)
        thread.join(30)
        assert not thread.is_alive()
