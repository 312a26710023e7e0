"""Log records of our own: one JSON object a line on stderr, with the event's name and its fields.

    {"t": 1764521.123, "level": "INFO", "process": "ctx-0", "at": "tailrace.transfer.node", "event": "pair_ready", ...}

Repeats of one event by one module within a second are counted, not written, beyond `BURST`: an engine's death may not
flood the log. Knows nothing of what is logged. Other libraries' records are written alike from WARNING on, unless the
process has somewhere else to put them.

Where Serve does not log to stderr it puts a logger of its own in place of `sys.stderr`, at INFO, which its level then
drops: so records go to the process's own stderr, which Ray keeps in a file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Callable

BURST = 20
WINDOW_S = 1.0
_OURS = "tailrace"
_handlers: list[tuple[logging.Logger, logging.Handler]] = []


class JsonFormatter(logging.Formatter):
    """One line of JSON; `fields` of the record's `extra` become keys."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, object] = {
            "t": round(record.created, 3),
            "level": record.levelname,
            "process": self.process,
            "at": record.name,
            "event": record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            row[f"{key}_of" if key in row else key] = value
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


class RateLimit(logging.Filter):
    """Lets `BURST` records of one (module, event) pass in a window; the next one that passes says how many did not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, key = self.clock(), (record.name, str(record.msg))
        start, count = self.seen.get(key, (now, 0))
        if now - start >= WINDOW_S:
            if count > BURST:
                record.fields = {**getattr(record, "fields", {}), "suppressed": count - BURST}
            start, count = now, 0
        self.seen[key] = (start, count + 1)
        return count < BURST


def configure(level: str, process: str) -> None:
    """Log to stderr as `process`; calling it again replaces the earlier set-up (a replica that is made anew)."""
    for logger, handler in _handlers:
        logger.removeHandler(handler)
    _handlers.clear()
    ours, root = logging.getLogger(_OURS), logging.getLogger()
    _add(ours, process)
    ours.setLevel(level)
    ours.propagate = False
    if not root.handlers:
        _add(root, process)


def _add(logger: logging.Logger, process: str) -> None:
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter(process))
    handler.addFilter(RateLimit())
    logger.addHandler(handler)
    _handlers.append((logger, handler))


def versions() -> dict[str, str]:
    """Version and place of what decides how a worker behaves; nothing is imported for it."""
    found: dict[str, str] = {"python": sys.version.split()[0]}
    for package in ("torch", "nixl", "ucxx", "ray"):
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "?"
        found[package] = f"{version} ({spec.origin})"
    return found
