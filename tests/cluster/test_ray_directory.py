"""The directory in Ray's own key-value store, in a process of its own since a local cluster wants Ray unimported."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.serve, pytest.mark.timeout(120)]

CODE = """
from tailrace.cluster.launcher import LocalCluster, free_ports
from tailrace.cluster.discovery import RayDirectory, shared_secret

with LocalCluster("raydirectory", {"host": "127.0.0.1", "port": free_ports(1)[0]}) as cluster:
    one, other = RayDirectory("one"), RayDirectory("two")
    assert one.lookup("router") is None
    one.publish("router", {"port": 1})
    one.publish("router", {"port": 2})
    assert one.lookup("router") == {"port": 2} and other.lookup("router") is None
    one.publish("worker.ctx-0", {"phase": "load"})
    assert one.names("worker.") == ["worker.ctx-0"], one.names("worker.")
    assert one.publish_once("secret", {"value": "a" * 32}) == {"value": "a" * 32}
    assert shared_secret(one, None) == b"a" * 32
    one.withdraw("router")
    assert one.lookup("router") is None
    assert cluster.alive()
print("well")
"""


def test_entries_live_in_rays_store_apart_by_application():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and result.stdout.endswith("well\n"), result.stdout + result.stderr[-3000:]
