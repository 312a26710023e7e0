"""`ray up` on three hosts: context workers on one, generation workers on another, pages between them over nixl.

The hosts are network namespaces of this machine, made by the script beside the project's shared papers; run by
`make test-cluster`, as root, with openssh-server, rsync and iproute2 installed.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT.parent / "shared" / "tools" / "three_hosts.sh"
HEAD, CTX_HOST, GEN_HOST = "10.77.0.1", "10.77.0.2", "10.77.0.3"
BIN = ROOT / ".venv" / "bin"

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SCRIPT.exists(), reason="the three hosts' script is not beside the project"),
    pytest.mark.skipif(os.geteuid() != 0, reason="making hosts needs root"),
    pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin:/usr/bin") is None, reason="openssh-server is missing"),
]


def run(*command: str | Path, limit_s: float = 300, **options) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-3000:]}{result.stderr[-3000:]}"
    return result.stdout


class Cluster:
    """The hosts, and Ray on them by the project's own manifest with this machine's key and paths put in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hosts, self.home = folder, folder / "hosts", folder / "home"
        (self.home / ".ray").mkdir(parents=True)
        self.environment = {**os.environ, "HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}"}
        self.manifest = folder / "ray.yaml"
        text = (ROOT / "manifests/ray/local.yaml").read_text()
        text = text.replace("~/.ssh/id_ed25519", str(self.hosts / "id")).replace("$HOME/tailrace", str(ROOT))
        self.manifest.write_text(text)

    def up(self) -> None:
        run("bash", SCRIPT, "up", self.hosts)
        run(BIN / "ray", "get-auth-token", "--generate", env=self.environment)
        time.sleep(1)
        run(BIN / "ray", "up", "-y", "--no-config-cache", self.manifest, env=self.environment)

    def on_head(self, command: str, limit_s: float = 300) -> str:
        ssh = ("ssh", "-i", self.hosts / "id", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
        return run(
            *ssh, f"root@{HEAD}", f"cd {ROOT} && RAY_AUTH_MODE=token PATH={BIN}:$PATH {command}", limit_s=limit_s
        )

    def down(self) -> None:
        run(BIN / "ray", "down", "-y", self.manifest, env=self.environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("three"))
    try:
        made.up()
        yield made
        made.down()
    finally:
        run("bash", SCRIPT, "down", made.hosts)
        for number in (1, 2, 3):  # a namespace that ends late keeps its cable
            subprocess.run(["ip", "link", "del", f"tlv{number}"], capture_output=True, check=False)


def until(condition, limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {limit_s} s"
        time.sleep(1)


def test_a_prompt_is_prefilled_on_one_host_and_decoded_on_another_over_nixl(cluster: Cluster):
    until(lambda: "3 local.cluster.node" in cluster.on_head("ray status"), 120, "three nodes")
    cluster.on_head("serve run --non-blocking manifests/serve/cluster.yaml")
    url = f"http://{HEAD}:8000"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/ready", timeout=5, trust_env=False).json().get("status") == "ready"
        except (httpx.HTTPError, ValueError, AttributeError):
            return False

    until(ready, 180, "readiness")
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
        pools = client.get("/cluster").json()["pools"]
        assert [w["address"].split(":")[0] for w in pools["ctx"]["workers"]] == [CTX_HOST]
        assert [w["address"].split(":")[0] for w in pools["gen"]["workers"]] == [GEN_HOST]
        until(lambda: wire_bytes(client) > 0, 10, "a transfer over nixl")
    cluster.on_head("serve shutdown -y")


def wire_bytes(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    wanted = [x for x in lines if x.startswith("tailrace_transfer_bytes_total{") and 'transport="nixl"' in x]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted if 'kind="wire"' in line)
