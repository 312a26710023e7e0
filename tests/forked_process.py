"""Processes of the application, forked from one that has imported what they run.

Importing torch and what stands on it costs a process several seconds of a slow core, and the tests start hundreds. What
a child runs is the product's own `tailrace.cluster.process.main`, with the arguments, output and limits of a command.

    python tests/forked_process.py SOCKET MODULE ..     (the process that forks, started by `Nursery`)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MODULES = {  # role -> what it will import
    "router": ("tailrace.cluster.process", "tailrace.cluster.front"),
    "ctx": ("tailrace.cluster.process", "tailrace.cluster.worker", "numba"),
}
MODULES |= {"ingress": MODULES["router"], "gen": MODULES["ctx"]}
# As cluster/rank.py wants it of a worker of one thread; torch reads it when it is imported.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
MAX_REQUEST = 65536


class Forked:
    """What tests use of `subprocess.Popen`, for a process that is not this one's child."""

    def __init__(self, pid: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(stdout)
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._status.read() or -signal.SIGKILL)
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks, of one kind of role; it ends with this one, or with `close`."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **ENVIRONMENT})
        theirs.close()

    def start(self, arguments: list[str], log: Path, max_open_files: int | None) -> Forked:
        """Start `tailrace.cluster.process` with these arguments; its stderr is appended to `log`."""
        request = {"arguments": arguments, "log": str(log), "max_open_files": max_open_files, "cwd": os.getcwd()}
        stdout, their_stdout = os.pipe()
        status, their_status = os.pipe()
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [their_stdout, their_status])
            answer = self._socket.recv(MAX_REQUEST)
        os.close(their_stdout)
        os.close(their_status)
        assert answer, f"the process that forks ended with {self._process.wait()}"
        return Forked(int(answer), stdout, status)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_nurseries: dict[tuple[str, ...], Nursery] = {}


def start(role: str, arguments: list[str], log: Path, max_open_files: int | None = None) -> Forked:
    """A process of this role; the process that forks it is started at the first use and lives on until `close`."""
    nursery = _nurseries.get(MODULES[role])
    if nursery is None:
        nursery = _nurseries[MODULES[role]] = Nursery(MODULES[role])
    return nursery.start([role, *arguments], log, max_open_files)


def close() -> None:
    """End the processes that fork; what they started lives on."""
    while _nurseries:
        _nurseries.popitem()[1].close()


# ----------------------------------------------------------------------------------------------- the process that forks


def serve(requests: socket.socket) -> None:
    """Fork a child for every request, and write down how each ended, until the other side is gone."""
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, waker], [], [])
        if waker in ready:
            os.read(waker, MAX_REQUEST)
            _reap(statuses)
        if requests in ready:
            data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 2)
            if not data:
                return
            stdout, status = fds
            pid = os.fork()
            if pid == 0:
                for fd in (waker, wake, status, requests.fileno(), *statuses.values()):
                    os.close(fd)
                _run(json.loads(data), stdout)
            statuses[pid] = status
            os.close(stdout)
            requests.send(str(pid).encode())


def _reap(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError), os.fdopen(statuses.pop(pid), "wb") as told:
            told.write(str(os.waitstatus_to_exitcode(status)).encode())


def _run(request: dict[str, Any], stdout: int) -> None:
    """The child: from here on as if it had been started by its command."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, place in ((stdout, 1), (log, 2)):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(request["cwd"])
    if request["max_open_files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["max_open_files"],) * 2)
    sys.argv = ["tailrace.cluster.process", *request["arguments"]]
    main = importlib.import_module("tailrace.cluster.process").main
    main()
    sys.exit(0)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose threads: {threads}"
    gc.freeze()  # what is imported stays: no child looks at it again
    serve(socket.socket(fileno=int(sys.argv[1])))
