"""What entered and what left a prefix index since it was last asked, so that others can follow it.

Net: what entered and left again in between is not in it, so it is bounded by what the index holds now and held when it
was last asked. Nobody need ever ask. Not thread-safe: it belongs to its index.
"""

from __future__ import annotations

Hashes = tuple[tuple[bytes, bytes], ...]
"""(namespace, packed hashes) each."""


class Changes:
    """See the module. Keys are those of the index's nodes: the hash of a granule's last block."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, dict[bytes, bool]] = {}  # key -> True: entered, False: left

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def entered(self, namespace: bytes, key: bytes) -> None:
        space = self._spaces.setdefault(namespace, {})
        if space.get(key) is False:
            del space[key]
        else:
            space[key] = True

    def left(self, namespace: bytes, key: bytes) -> None:
        space = self._spaces.setdefault(namespace, {})
        if space.get(key) is True:
            del space[key]
        else:
            space[key] = False

    def forget(self) -> None:
        self._spaces.clear()

    def take(self) -> tuple[Hashes, Hashes]:
        """(entered, left) since the last call; a key is in one of them at most."""
        spaces, self._spaces = self._spaces, {}
        return _packed(spaces, True), _packed(spaces, False)


def _packed(spaces: dict[bytes, dict[bytes, bool]], kind: bool) -> Hashes:
    packed = ((name, b"".join(key for key, is_in in space.items() if is_in is kind)) for name, space in spaces.items())
    return tuple((name, hashes) for name, hashes in packed if hashes)
