"""Log records as lines of JSON, and their flood control."""

import json
import logging
import subprocess
import sys

from tailrace.cluster.log import BURST, JsonFormatter, RateLimit, versions


def record(event: str, fields: dict | None = None, name: str = "tailrace.x") -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "x.py", 1, event, (), None)
    if fields is not None:
        made.fields = fields
    return made


def test_a_record_is_one_line_of_json_with_its_fields():
    line = JsonFormatter("ctx-0").format(record("pair_ready", {"worker": "gen-0", "bytes": 3}))
    row = json.loads(line)
    assert "\n" not in line
    assert (row["event"], row["process"], row["worker"], row["bytes"]) == ("pair_ready", "ctx-0", "gen-0", 3)
    assert row["at"] == "tailrace.x" and row["level"] == "WARNING"


def test_a_field_does_not_hide_who_is_speaking():
    row = json.loads(JsonFormatter("router").format(record("link_closed", {"process": "ingress-0"})))
    assert (row["process"], row["process_of"]) == ("router", "ingress-0")


def test_a_flood_of_one_event_is_cut_and_counted_and_others_pass():
    now = [0.0]
    limit = RateLimit(lambda: now[0])
    assert sum(limit.filter(record("lost")) for _ in range(100)) == BURST
    assert limit.filter(record("other")) and limit.filter(record("lost", name="tailrace.y"))
    now[0] = 1.1
    after = record("lost")
    assert limit.filter(after)
    assert after.fields == {"suppressed": 100 - BURST}
    again = record("lost")
    assert limit.filter(again) and not hasattr(again, "fields")


def test_the_start_record_names_versions_and_places():
    found = versions()
    assert found["torch"].startswith("2.") and "site-packages" in found["torch"]
    assert {"python", "torch", "ray"} <= set(found)


def written(script: str) -> list[dict]:
    """Rows on the stderr of a process that runs the script, in which something else stands in place of sys.stderr."""
    before = "import asyncio, io, logging, sys; from tailrace.cluster import log as logs; sys.stderr = io.StringIO()\n"
    after = "\nassert not sys.stderr.getvalue()"
    run = subprocess.run([sys.executable, "-c", before + script + after], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stderr.splitlines()]


def test_records_reach_the_process_s_own_stderr_whatever_stands_in_its_place():
    (row,) = written("""
logs.configure("INFO", "first")
logs.configure("INFO", "router")
logging.getLogger("tailrace.router.core").info("worker_dead", extra={"fields": {"worker": "ctx-0"}})
""")
    assert (row["process"], row["event"], row["worker"]) == ("router", "worker_dead", "ctx-0")


def test_other_libraries_faults_are_written_with_their_trace_and_their_chatter_is_not():
    (row,) = written("""
logs.configure("INFO", "first")
logs.configure("INFO", "ingress-0")
logging.getLogger("somebody").info("chatter")
loop = asyncio.new_event_loop()
loop.call_soon(lambda: {}["a callback's own fault"])
loop.call_soon(loop.stop)
loop.run_forever()
loop.close()
""")
    assert row["at"] == "asyncio" and row["process"] == "ingress-0" and "KeyError" in row["traceback"]
