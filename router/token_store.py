"""Tokenized parts of texts in one file, shared by the ingress processes of a node. SQLite, and bounded in bytes.

    parts(key, ids, used)      ids: little-endian uint32; used: the clock of `total` when it was last written or found
    total(bytes, clock)        one row; changed in the transaction that changes parts, so that it is their sum always

A cache and nothing more: what cannot be read or written in time is tokenized instead. Keys are hashes of the
tokenizer's revision and the text, values are numbers, so nothing in the file is ever executed or unpickled. The file is
its application's: the last to close it removes it.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

OPEN_S = 5.0
BUSY_S = 0.02  # longer than that and tokenizing is quicker
ROW_BYTES = 64  # counted for each row beside its ids
_KEYS_A_QUERY = 500
_EVICT_TO = 0.9  # of the bound, so that not every write evicts

_TABLES = """
CREATE TABLE IF NOT EXISTS parts (key BLOB PRIMARY KEY, ids BLOB NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON parts (used);
CREATE TABLE IF NOT EXISTS total (
    one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER NOT NULL, clock INTEGER NOT NULL
);
INSERT OR IGNORE INTO total VALUES (1, 0, 0);
"""


class TokenStore:
    """See the module. Thread-safe; one connection.

    Args:
        path: of the file; made if it is not there.
        max_bytes: of all rows, ROW_BYTES each included.

    Attributes:
        evictions: rows that this process deleted for want of room.
        bytes: of all rows, as this process last knew them.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self.evictions = self.bytes = 0
        self._lock = threading.Lock()
        path.touch(mode=0o600)  # ids are prompts to whoever has the tokenizer; SQLite's further files take this mode
        self._db = sqlite3.connect(path, timeout=OPEN_S, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=WAL", "synchronous=OFF"):  # a lost cache is tokenized anew
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_TABLES)
        self._db.execute(f"PRAGMA busy_timeout={int(BUSY_S * 1000)}")

    def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Those of the keys that are there, with their ids; they count as used."""
        found: dict[bytes, bytes] = {}
        try:
            with self._lock:
                for at in range(0, len(keys), _KEYS_A_QUERY):
                    some = keys[at : at + _KEYS_A_QUERY]
                    marks = ",".join("?" * len(some))
                    found |= self._db.execute(f"SELECT key, ids FROM parts WHERE key IN ({marks})", some).fetchall()
        except sqlite3.OperationalError as error:
            log.warning("token_store_not_read", extra={"fields": {"reason": str(error)}})
        return found

    def add(self, items: Mapping[bytes, bytes], used: Sequence[bytes] = ()) -> None:
        """Write parts (key -> ids) and mark others as used; the least recently used ones go when there is no room."""
        try:
            with self._lock:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    self._write(items, used)
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            log.warning("token_store_not_written", extra={"fields": {"reason": str(error)}})

    def size(self) -> tuple[int, int]:
        """(bytes as accounted, bytes as they are)."""
        with self._lock:
            (accounted,) = self._db.execute("SELECT bytes FROM total").fetchone()
            (actual,) = self._db.execute(f"SELECT IFNULL(SUM(LENGTH(ids) + {ROW_BYTES}), 0) FROM parts").fetchone()
        return accounted, actual

    def close(self) -> None:
        """Close the file, and remove it if nobody else has it open."""
        with self._lock:
            try:
                alone = self._db.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
            except sqlite3.OperationalError:  # locked: another process uses it
                alone = False
            self._db.close()
            if alone:
                self._path.unlink(missing_ok=True)

    def _write(self, items: Mapping[bytes, bytes], used: Sequence[bytes]) -> None:
        db = self._db
        (clock,) = db.execute("UPDATE total SET clock = clock + 1 RETURNING clock").fetchone()
        added = 0
        for key, ids in items.items():
            if db.execute("INSERT OR IGNORE INTO parts VALUES (?, ?, ?)", (key, ids, clock)).rowcount:
                added += len(ids) + ROW_BYTES
        db.executemany("UPDATE parts SET used = ? WHERE key = ?", [(clock, key) for key in used])
        (total,) = db.execute("UPDATE total SET bytes = bytes + ? RETURNING bytes", (added,)).fetchone()
        if total > self._max_bytes:
            total -= self._evict(total - int(self._max_bytes * _EVICT_TO))
        self.bytes = total

    def _evict(self, at_least: int) -> int:
        """Delete the least recently used rows, and take off exactly what was deleted; returns that."""
        freed = 0
        while freed < at_least:
            rows = self._db.execute("SELECT key, LENGTH(ids) FROM parts ORDER BY used LIMIT 64").fetchall()
            if not rows:
                break
            for key, length in rows:
                if freed >= at_least:
                    break
                gone = self._db.execute("DELETE FROM parts WHERE key = ?", (key,)).rowcount
                freed += (length + ROW_BYTES) * gone
                self.evictions += gone
        self._db.execute("UPDATE total SET bytes = bytes - ?", (freed,))
        return freed
