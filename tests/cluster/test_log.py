"""Log records as lines of JSON, and their flood control."""

import json
import logging

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
