"""Stands in for a rank process in tests of its supervisor: speaks the channel, computes nothing.

usage: fake_rank.py BEHAVIOUR DIR --parent=.. --report-fd=.. --stamp-fd=.. [--channel-fd=.. --meeting-fd=..]
BEHAVIOUR@N is rank N's alone, the other ranks live. Everything it reads is appended to DIR/heard, at a further rank to
DIR/heard.RANK.
"""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from tailrace.cluster.progress import ProgressStamp

(behaviour, _, whose), directory = sys.argv[1].partition("@"), Path(sys.argv[2])
given = [part.removeprefix("--").split("=") for part in sys.argv[3:]]
options = dict(given)
channels = [socket.socket(fileno=int(fd)) for name, fd in given if name == "channel-fd"]
stamp = ProgressStamp(int(options["stamp-fd"]))
report = os.fdopen(int(options["report-fd"]), "w")


def say(message: dict) -> None:
    report.write(json.dumps(message) + "\n")
    report.flush()


spec = json.loads(sys.stdin.readline())
rank = spec["rank"]
if whose and int(whose) != rank:
    behaviour = "lives"
notes = directory / (f"heard.{rank}" if rank else "heard")
notes.write_text(json.dumps(spec) + "\n")
if behaviour == "fails":
    say({"failed": "kv_bytes: too small for this model"})
    sys.exit(3)
if behaviour == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "hangs_in_load":
    time.sleep(60)
if behaviour == "deaf" or rank:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if behaviour == "slow":
    for step in range(4):
        stamp.write("load", step / 4)
        time.sleep(0.3)
if behaviour == "child" and os.fork() == 0:
    time.sleep(60)
    sys.exit(0)
stamp.write("run")
if rank:
    channels[0].send(b"v")  # its vote
else:
    for channel in channels:
        channel.recv(1)
    say({"ready": {"boot": spec["boot"], "host": spec["host"], "port": 4711, "pid": os.getpid()}})
if behaviour == "busy_once":
    time.sleep(0.5)  # one long pass
os.set_blocking(0, False)
leader = channels[0] if rank else None
while True:
    if behaviour != "stuck":
        stamp.write("run")
    line = sys.stdin.readline()
    if line:
        with notes.open("a") as heard:
            heard.write(line)
        if "drain" in line and behaviour == "drains":
            say({"drained": True})
    with suppress(BlockingIOError):
        if leader is not None and leader.recv(1, socket.MSG_DONTWAIT) == b"":
            sys.exit(0)
    time.sleep(0.02)
