"""Parts of the HTTP side by themselves: the head that goes out with its body, and work that ends with its client."""

import asyncio

import pytest

from tailrace.router.http_limits import HeadWithBody
from tailrace.router.sse import until_gone

pytestmark = pytest.mark.asyncio
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """A transport that notes what it is told to do."""

    def __init__(self) -> None:
        self.told: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("close")

    def is_closing(self) -> bool:
        return "close" in self.told


async def test_a_head_goes_out_with_what_follows_it():
    wire = Wire()
    transport = HeadWithBody(wire, asyncio.get_running_loop())
    transport.write(HEAD)
    transport.write(b"first")
    transport.write(b"second")
    await asyncio.sleep(0)
    assert wire.told == [HEAD + b"first", b"second"]


async def test_a_head_that_nothing_follows_goes_out_in_the_same_turn_of_the_loop():
    wire = Wire()
    transport = HeadWithBody(wire, asyncio.get_running_loop())
    transport.write(HEAD)
    await asyncio.sleep(0)
    assert wire.told == [HEAD]
    transport.write(HEAD)
    transport.close()
    assert wire.told == [HEAD, HEAD, "close"] and transport.is_closing()


async def test_a_body_that_looks_like_a_head_keeps_its_place():
    wire = Wire()
    transport = HeadWithBody(wire, asyncio.get_running_loop())
    for data in (HEAD, b"HTTP/1.1 is a protocol", b"HTTP/1.0 too", b"."):
        transport.write(data)
    await asyncio.sleep(0)
    assert b"".join(wire.told) == HEAD + b"HTTP/1.1 is a protocolHTTP/1.0 too."


class Client:
    """`receive` of a client that has sent its body, until it is told to leave."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_work_that_ends_before_its_client_leaves_nothing_behind():
    client, task = Client(), asyncio.current_task()
    before = asyncio.all_tasks()

    async def work():
        await asyncio.sleep(0.001)
        client.gone.set()  # too late

    assert await until_gone(work(), client.receive)
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before and task is not None and not task.cancelling()


async def test_work_is_cancelled_when_its_client_leaves_and_its_caller_goes_on():
    client, task = Client(), asyncio.current_task()
    seen = []

    async def work():
        try:
            asyncio.get_running_loop().call_later(0.01, client.gone.set)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    assert not await until_gone(work(), client.receive)
    assert seen == ["cancelled"] and task is not None and not task.cancelling()
    async with asyncio.timeout(5):
        await asyncio.sleep(0)  # a caller that counts its cancellations is not misled


async def test_errors_of_the_work_and_cancellations_of_the_caller_pass_through():
    client = Client()

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        await until_gone(fails(), client.receive)
    caller = asyncio.create_task(until_gone(asyncio.sleep(30), client.receive))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    both = asyncio.create_task(until_gone(asyncio.sleep(30), client.receive))
    await asyncio.sleep(0.01)
    client.gone.set()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
