"""Where processes find each other: small JSON entries under a name, in Ray's key-value store or in a folder.

Carries addresses and phases only, nothing of a request. Entries are hints: whoever dials one checks the boot id on
connect, so a stale entry costs a refused connection. If the store is gone, what is connected goes on.

Names: `router` -> {host, port, boot}; `worker.<name>` -> {role, phase, ...} for those who watch a start; `secret` ->
{value}, drawn once by whoever is first.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tailrace.model.errors import PeerError

ROUTER = "router"
WORKER_PREFIX = "worker."
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Entry = dict[str, Any]
T = TypeVar("T")


class Directory(Protocol):
    """A shared map from names to entries. Every method may block for one round trip."""

    def publish(self, name: str, entry: Entry) -> None: ...

    def publish_once(self, name: str, entry: Entry) -> Entry:
        """The entry that was there first, which is `entry` if none was."""
        ...

    def lookup(self, name: str) -> Entry | None: ...

    def withdraw(self, name: str) -> None: ...

    def names(self, prefix: str) -> list[str]: ...


class FileDirectory:
    """One file an entry; for processes of one host that run without Ray."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no directory name")
        return self.path / f"{name}.json"

    def _written(self, entry: Entry) -> Path:
        fd, path = tempfile.mkstemp(dir=self.path, prefix=".new-")
        with os.fdopen(fd, "w") as out:
            json.dump(entry, out)
        return Path(path)

    def publish(self, name: str, entry: Entry) -> None:
        self._written(entry).replace(self._file(name))

    def publish_once(self, name: str, entry: Entry) -> Entry:
        new = self._written(entry)
        try:
            os.link(new, self._file(name))  # atomic, and fails if it exists
        except FileExistsError:
            found = self.lookup(name)
            return entry if found is None else found
        finally:
            new.unlink()
        return entry

    def lookup(self, name: str) -> Entry | None:
        try:
            return json.loads(self._file(name).read_text())
        except FileNotFoundError:
            return None

    def withdraw(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        return sorted(p.stem for p in self.path.glob("*.json") if p.stem.startswith(prefix))


class RayDirectory:
    """Entries in the key-value store of Ray's head; to be made in a process that is connected to Ray."""

    def __init__(self, app_name: str) -> None:
        self.namespace = f"tailrace/{app_name}".encode()

    @staticmethod
    def _key(name: str) -> bytes:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no directory name")
        return name.encode()

    def publish(self, name: str, entry: Entry) -> None:
        self._put(name, entry, overwrite=True)

    def publish_once(self, name: str, entry: Entry) -> Entry:
        self._put(name, entry, overwrite=False)
        found = self.lookup(name)
        return entry if found is None else found

    def _put(self, name: str, entry: Entry, *, overwrite: bool) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        value = json.dumps(entry).encode()
        _reached(lambda: _internal_kv_put(self._key(name), value, overwrite, namespace=self.namespace))

    def lookup(self, name: str) -> Entry | None:
        from ray.experimental.internal_kv import _internal_kv_get

        value = _reached(lambda: _internal_kv_get(self._key(name), namespace=self.namespace))
        return None if value is None else json.loads(value)

    def withdraw(self, name: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        _reached(lambda: _internal_kv_del(self._key(name), namespace=self.namespace))

    def names(self, prefix: str) -> list[str]:
        from ray.experimental.internal_kv import _internal_kv_list

        return sorted(key.decode() for key in _reached(lambda: _internal_kv_list(prefix, namespace=self.namespace)))


def _reached(call: Callable[[], T]) -> T:
    """The answer of Ray's store; PeerError if its head cannot be reached."""
    from ray.exceptions import RaySystemError, RpcError

    try:
        return call()
    except (RpcError, RaySystemError, ConnectionError) as error:
        raise PeerError(f"Ray's key-value store does not answer: {error}") from error


def shared_secret(directory: Directory, configured: str | None) -> bytes:
    """The cluster secret: the configured one, else one that the first process of the application drew."""
    if configured is not None:
        return configured.encode()
    value = directory.publish_once("secret", {"value": secrets.token_hex(32)})["value"]
    if not isinstance(value, str) or len(value) < 16:
        raise PeerError("the directory's entry 'secret' is not a secret")
    return value.encode()
