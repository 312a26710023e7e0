"""Stands in for a rank process in tests of its supervisor: speaks the channel, computes nothing.

usage: fake_rank.py BEHAVIOUR DIR --parent=.. --report-fd=.. --stamp-fd=..
Everything it reads is appended to DIR/heard.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tailrace.cluster.progress import ProgressStamp

behaviour, directory = sys.argv[1], Path(sys.argv[2])
options = dict(part.removeprefix("--").split("=") for part in sys.argv[3:])
stamp = ProgressStamp(int(options["stamp-fd"]))
report = os.fdopen(int(options["report-fd"]), "w")


def say(message: dict) -> None:
    report.write(json.dumps(message) + "\n")
    report.flush()


spec = json.loads(sys.stdin.readline())
(directory / "heard").write_text(json.dumps(spec) + "\n")
if behaviour == "fails":
    say({"failed": "kv_bytes: too small for this model"})
    sys.exit(3)
if behaviour == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "hangs_in_load":
    time.sleep(60)
if behaviour == "deaf":
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
say({"ready": {"boot": f"boot{os.getpid()}", "host": spec["host"], "port": 4711, "pid": os.getpid()}})
if behaviour == "busy_once":
    time.sleep(0.5)  # one long pass
os.set_blocking(0, False)
while True:
    if behaviour != "stuck":
        stamp.write("run")
    line = sys.stdin.readline()
    if line:
        with (directory / "heard").open("a") as heard:
            heard.write(line)
        if "drain" in line and behaviour == "drains":
            say({"drained": True})
    time.sleep(0.02)
