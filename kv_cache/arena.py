"""A worker's pages and their generation numbers, in named shared memory that peers on the host map read-only.

    [header and known bytes, 4096 | generations uint64 * num_pages | pad to 4096 | pages num_pages * bytes_per_page]

Named tailrace-<app>-<worker>-<boot>, and _r1, _r2.. behind it for further ranks of a tensor parallel worker. Page p of
all ranks belongs together, and its one generation number stands in rank 0's arena; those of the others have none. Rank
0 makes all of them; each other rank maps its own, by name, and nobody else ever writes. The files are unlinked by rank
0 at an orderly end, or by the next boot of the same worker; they are never truncated, so a peer that mapped one can go
on reading after its owner died. Plain files under /dev/shm: no resource tracker stands behind them.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from tailrace.kv_cache.layout import Layout
from tailrace.model.errors import ConfigError, PeerError

SHARED_MEMORY = Path("/dev/shm")
_ALIGN = 4096
_MAGIC = b"tailrace"
_VERSION = 2
_HEADER = struct.Struct("<8sIQQQ")  # magic, version, num_pages, bytes_per_page, offset of the pages
_NAME = re.compile(r"tailrace-[^-/]+-[^-/]+-[0-9A-Za-z_]+")


def _escape(part: str) -> str:
    """Letters, digits and _ as they are, all else as %xx: a dash then only ever separates the parts of a name."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"%{ord(c):02x}" for c in part)


def arena_name(app: str, worker: str, boot: str, rank: int = 0) -> str:
    """Name of the arena of one rank of one boot of one worker. Raises ConfigError if a part is empty."""
    if not (app and worker and boot):
        raise ConfigError(f"an arena needs an application, a worker and a boot id, not {(app, worker, boot)!r}")
    behind = f"_r{rank}" if rank else ""
    return f"tailrace-{_escape(app)}-{_escape(worker)}-{_escape(boot).replace('%', '_')}{behind}"


def unlink_earlier(app: str, worker: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove the names that earlier boots of this worker left, of all their ranks; returns them. Peers keep what they
    have mapped.

    To be called before this boot's own `create`. Names of other workers, applications and programs stay.
    """
    prefix = arena_name(app, worker, "x")[:-1]
    removed = []
    for entry in directory.iterdir():
        if entry.name.startswith(prefix) and _NAME.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
            removed.append(entry.name)
    return removed


class Arena:
    """One mapping of an arena: by who made it (`create`), by its rank (`open_own`) or by a peer (`open_read_only`).

    Attributes:
        name: tailrace-<app>-<worker>-<boot>, for further ranks with _r<rank>.
        pages: [num_pages, bytes_per_page] uint8; read-only at a peer.
        generations: [num_pages] uint64; read-only at a peer. Empty in the arena of a further rank.
    """

    def __init__(self, name: str, path: Path, memory: mmap.mmap, num_pages: int, bytes_per_page: int, at: int) -> None:
        self.name = name
        self._path = path
        self._probe = np.frombuffer(memory, np.uint8, _ALIGN - _HEADER.size, _HEADER.size)
        has_numbers = at > _ALIGN
        self.generations: np.ndarray = np.frombuffer(memory, np.uint64, num_pages if has_numbers else 0, _ALIGN)
        self.pages: np.ndarray = np.frombuffer(memory, np.uint8, num_pages * bytes_per_page, at).reshape(
            num_pages, bytes_per_page
        )

    @classmethod
    def create(
        cls,
        name: str,
        layout: Layout,
        num_pages: int,
        directory: Path = SHARED_MEMORY,
        *,
        with_generations: bool = True,
        with_pages: bool = True,
    ) -> Arena:
        """Make and map a new arena; its room is allocated at once, so no later write can fail for want of it.

        `with_generations`: it is rank 0's. `with_pages`: not if they stand elsewhere; then each has 0 bytes here.

        Raises:
            ConfigError: it does not fit (both sizes are named), the name is taken or is not an arena's name.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not an arena name; make it by arena_name")
        at = _ALIGN + (-(-num_pages * 8 // _ALIGN) * _ALIGN if with_generations else 0)
        bytes_per_page = layout.bytes_per_page if with_pages else 0
        size = at + num_pages * bytes_per_page
        path = directory / name
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ConfigError(f"shared memory {path} exists already: two workers have one name and boot id") from None
        try:
            _reserve(fd, path, size)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # no page faults later
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        memory[_HEADER.size : _ALIGN] = known_bytes(name, _ALIGN - _HEADER.size)
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, num_pages, bytes_per_page, at)
        return cls(name, path, memory, num_pages, bytes_per_page, at)

    @classmethod
    def open_read_only(cls, name: str, directory: Path = SHARED_MEMORY) -> Arena:
        """Map a peer's arena. Raises PeerError if it is gone or is not an arena of this version."""
        return cls._open(name, directory, os.O_RDONLY, mmap.MAP_SHARED, mmap.PROT_READ)

    @classmethod
    def open_own(cls, name: str, directory: Path = SHARED_MEMORY) -> Arena:
        """Map, by the rank whose pages it holds, an arena that rank 0 has made. Raises PeerError as above."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults later
        return cls._open(name, directory, os.O_RDWR, flags, mmap.PROT_READ | mmap.PROT_WRITE)

    @classmethod
    def _open(cls, name: str, directory: Path, access: int, flags: int, protection: int) -> Arena:
        if not _NAME.fullmatch(name):
            raise PeerError(f"{name!r} is not an arena name")
        path = directory / name
        try:
            fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise PeerError(f"shared memory {path} cannot be opened: {error.strerror}") from None
        try:
            size = os.fstat(fd).st_size
            if size < _ALIGN:
                raise PeerError(f"shared memory {path} has {size} bytes and no header")
            memory = mmap.mmap(fd, size, flags=flags, prot=protection)
        finally:
            os.close(fd)
        magic, version, num_pages, bytes_per_page, at = _HEADER.unpack(memory[: _HEADER.size])
        numbers = -(-num_pages * 8 // _ALIGN) * _ALIGN
        whole = at in (_ALIGN, _ALIGN + numbers) and at + num_pages * bytes_per_page == size
        if magic != _MAGIC or version != _VERSION or not whole:
            raise PeerError(f"shared memory {path} is not an arena of version {_VERSION}, or is not finished")
        return cls(name, path, memory, num_pages, bytes_per_page, at)

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def bytes_per_page(self) -> int:
        return self.pages.shape[1]

    def is_readable(self) -> bool:
        """Whether the known bytes, which the owner derived from the name, are seen through this mapping."""
        return self._probe.tobytes() == known_bytes(self.name, len(self._probe))

    def close(self) -> None:
        """Give up this mapping; the memory is unmapped when the last array over it is gone."""
        self._probe = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint64)
        self.pages = np.empty((0, 0), np.uint8)

    def unlink(self) -> None:
        """Remove the name, by the owner; mappings stay readable."""
        self._path.unlink(missing_ok=True)


class ArenaGroup:
    """The arenas of all ranks of one worker, rank 0's first.

    Attributes:
        pages: of each rank, [num_pages, bytes_per_page of that rank] uint8.
        generations: [num_pages] uint64, of page p at every rank.
    """

    def __init__(self, arenas: Sequence[Arena]) -> None:
        """Raise PeerError if these are not the arenas of one worker, rank 0 first."""
        first, *others = arenas
        odd = [arena.name for arena in others if arena.num_pages != first.num_pages or len(arena.generations)]
        if odd or len(first.generations) != first.num_pages:
            names = ", ".join(arena.name for arena in arenas)
            raise PeerError(f"{names} are not the arenas of one worker, rank 0 first")
        self._arenas = tuple(arenas)
        self.pages: tuple[np.ndarray, ...] = tuple(arena.pages for arena in arenas)
        self.generations: np.ndarray = first.generations

    @classmethod
    def create(cls, names: Sequence[str], layout: Layout, num_pages: int, directory: Path = SHARED_MEMORY) -> Self:
        """Make and map one arena a name; `layout` is that of one rank. All or none; raises as Arena.create does."""
        made: list[Arena] = []
        try:
            for rank, name in enumerate(names):
                made.append(Arena.create(name, layout, num_pages, directory, with_generations=rank == 0))
        except BaseException:
            for arena in made:
                arena.unlink()
            raise
        return cls(made)

    @classmethod
    def open_read_only(cls, names: Sequence[str], directory: Path = SHARED_MEMORY) -> Self:
        """Map a peer's arenas. Raises PeerError if one is gone, is no arena, or they are not of one worker."""
        if not names:
            raise PeerError("a worker has at least one arena")
        return cls([Arena.open_read_only(name, directory) for name in names])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arena.name for arena in self._arenas)

    @property
    def num_pages(self) -> int:
        return len(self.generations)

    @property
    def bytes_per_page(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(arena.bytes_per_page for arena in self._arenas)

    def is_readable(self) -> bool:
        """As Arena.is_readable, of all."""
        return all(arena.is_readable() for arena in self._arenas)

    def close(self) -> None:
        """As Arena.close, all."""
        for arena in self._arenas:
            arena.close()
        self.pages, self.generations = (), np.empty(0, np.uint64)

    def unlink(self) -> None:
        """As Arena.unlink, all."""
        for arena in self._arenas:
            arena.unlink()


def known_bytes(name: str, nbytes: int) -> bytes:
    """What a peer expects to read in the memory of this name."""
    return hashlib.shake_256(name.encode()).digest(nbytes)


def mapped_elsewhere(app: str, worker: str, keep: str, processes: Path = Path("/proc")) -> dict[int, set[str]]:
    """Which other processes still map arenas of this worker's boots but `keep`, also unlinked ones: pid -> names.

    Processes of other users cannot be seen.
    """
    prefix, found = arena_name(app, worker, "x")[:-1], {}
    for process in processes.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        names = {Path(line.split(maxsplit=5)[-1].removesuffix(" (deleted)")).name for line in lines if prefix in line}
        names = {name for name in names if name.startswith(prefix) and name != keep}
        if names:
            found[int(process.name)] = names
    return found


def _reserve(fd: int, path: Path, size: int) -> None:
    room = os.fstatvfs(fd)
    free = room.f_bavail * room.f_frsize
    message = f"the page arena needs {size} bytes of shared memory, {path.parent} has {free} free"
    if size > free:
        raise ConfigError(message)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(message) from None
