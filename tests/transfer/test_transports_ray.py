"""The conformance suite, ray's part: joining, what Ray cannot move, notices that are lost, objects that are let go."""

from __future__ import annotations

import subprocess
import sys

import msgpack
import pytest
from transport_peers import KEY, assert_moved, assert_quiet, units_for, wait_for

from tailrace.model.errors import ConfigError, PeerError
from tailrace.transfer.page_plan import PoolGeometry
from tailrace.transfer.transports.base import PeerNotice
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.ray_objects import RayObjects

pytest.importorskip("ray", reason="the package ray is not installed")


def test_without_a_ray_the_transport_says_so_at_once():
    code = (
        "from tailrace.transfer.transports.ray_objects import RayObjects\n"
        "from tailrace.model.errors import ConfigError\n"
        "try: RayObjects('127.0.0.1:1')\n"
        "except ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("transport ray needs a running Ray, none answers at 127.0.0.1:1"), result.stderr
    assert issubclass(ConfigError, Exception)


def test_joining_leaves_the_signals_and_exceptions_of_the_process_alone(one_ray):
    code = (
        "import os, signal, sys\n"
        "from tailrace.transfer.transports.ray_objects import RayObjects\n"
        "mine = lambda *_: None\n"
        "signal.signal(signal.SIGTERM, mine)\n"
        "hook = sys.excepthook\n"
        "objects = RayObjects(os.environ['RAY_ADDRESS'])\n"
        "print(signal.getsignal(signal.SIGTERM) is mine, sys.excepthook is hook)\n"
        "objects.close()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "True True", result.stderr


def test_pages_that_need_a_form_of_their_own_are_refused(make_gen):
    gen = make_gen("ray")
    geometry = [PoolGeometry(n, 1, 2, 2, 8, "float32") for n in (16, 8)]
    with pytest.raises(PeerError, match="ray moves whole tensors"):
        gen.transport.connect("c1", b"", Conversion(*geometry))


def test_what_was_put_is_told_again_when_the_link_is_made_anew(make_gen):
    """The name of an object went over a link that broke: the same Hello brings it, and no page arrives twice."""
    gen = make_gen("ray")
    ctx = gen.new_ctx("c1", 64, child=False)
    gen.step()
    units = units_for([1, 2, 3], ctx.write([1, 2, 3], owner=1), [7, 8, 9])
    del gen.ctxs["c1"]  # nothing that either says arrives
    gen.ctxs, kept = {"c1": ctx}, gen.ctxs
    move = gen.start(KEY, ctx, units)
    gen.grant_and_post(move)
    lost: list[object] = []
    wait_for(
        lambda: [lost.extend(e for e in ctx.step() if isinstance(e, PeerNotice)), lost][1], "a notice that is lost"
    )
    assert not gen.landed and kept == {}
    gen.pair(ctx)
    gen.pair(ctx)
    gen.finish(move)
    assert len(move.ok) == 3 and len(gen.landed) == 1
    assert_moved(gen, units, owner=1)
    assert_quiet(gen)


def test_an_object_is_let_go_when_it_was_taken_or_is_not_wanted(make_gen):
    gen = make_gen("ray")
    ctx = gen.new_ctx("c1", 64, child=False)
    units = units_for([1, 2], ctx.write([1, 2], owner=1), [7, 8])
    gen.finish(gen.start(KEY, ctx, units))
    assert not ctx.transport._kept
    gen.unpack = False
    move = gen.start(("b", 1), ctx, units)
    gen.until(lambda: gen.landed[1:], "the second object")
    assert len(ctx.transport._kept) == 1
    gen.transport.drop_landed("c1", gen.landed[1].landed)
    move.granted -= 1
    gen.until(lambda: not move.posts, "its end")
    assert not ctx.transport._kept
    assert_quiet(gen)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"nonsense", msgpack.packb(["put", b"x", [b"", b"", b""]])])
def test_a_notice_that_is_none_is_the_peers_fault(data, make_gen):
    gen = make_gen("ray")
    gen.new_ctx("c1", 64, child=False)
    with pytest.raises(PeerError, match="no notice of the ray transport"):
        gen.transport.noticed("c1", data)


def test_an_object_of_an_owner_that_is_gone_is_lost_or_got_and_not_waited_for(make_gen):
    gen = make_gen("ray")
    ctx = gen.new_ctx("c1", 64, child=True)
    units = units_for([1, 2], ctx.write([1, 2], owner=1), [7, 8])
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "its name")
    ctx.kill()
    del gen.ctxs["c1"]
    gen.take(gen.landed[0])
    gen.until(lambda: not move.jobs, "the answer")
    ctx.close()
    if move.ok:  # Ray had not yet noticed, and the store is on this host
        assert_moved(gen, units, owner=1)
    else:
        assert "lost" in move.errors[0]
    assert isinstance(gen.transport._objects, RayObjects)
