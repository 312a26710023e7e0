"""The shared-memory arena: who may write, what outlives whom, and what is left in /dev/shm."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailrace.kv_cache.arena import SHARED_MEMORY, Arena, ArenaGroup, arena_name, unlink_earlier
from tailrace.kv_cache.layout import single_layout
from tailrace.model.errors import ConfigError, PeerError
from tailrace.model.state_groups import Field, GroupKind, StateGroup

LAYOUT = single_layout([StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 32), Field("v", 1, 32)))], 16, "float32")
APP = f"t{os.getpid()}_arena"
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(arena_name(APP, "ctx-0", "b1"), LAYOUT, 9)
    yield made
    made.unlink()


def test_a_peer_sees_what_the_owner_writes_and_cannot_write_itself(arena):
    peer = Arena.open_read_only(arena.name)
    arena.pages[3] = 7
    arena.generations[3] = 2**63 + 1
    assert (peer.num_pages, peer.bytes_per_page) == (9, LAYOUT.bytes_per_page)
    assert (peer.pages[3] == 7).all() and int(peer.generations[3]) == 2**63 + 1
    assert peer.is_readable()
    for array in (peer.pages, peer.generations):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_pages_do_not_share_a_memory_page_with_the_generations(arena):
    assert arena.pages.ctypes.data % 4096 == 0 and arena.generations.ctypes.data % 4096 == 0
    assert arena.pages.ctypes.data - arena.generations.ctypes.data >= 9 * 8


def test_a_mapping_can_be_read_after_the_name_is_gone_and_the_owner_dead(tmp_path):
    name = arena_name(APP, "ctx-1", "b1")
    reader, writer = os.pipe()
    owner = FORK.Process(target=_own, args=(name, tmp_path, writer))
    owner.start()
    assert os.read(reader, 1) == b"x"
    peer = Arena.open_read_only(name, tmp_path)
    owner.kill()
    owner.join()
    assert unlink_earlier(APP, "ctx-1", tmp_path) == [name]
    assert (peer.pages[5] == 42).all() and int(peer.generations[5]) == 3
    os.close(reader), os.close(writer)


def _own(name: str, directory: Path, ready: int) -> None:
    arena = Arena.create(name, LAYOUT, 9, directory)
    arena.pages[5] = 42
    arena.generations[5] = 3
    os.write(ready, b"x")
    signal.pause()


def test_after_twenty_kills_no_more_than_one_region_is_left(tmp_path):
    """SIGKILL leaves the region; the next boot of the same worker removes it, and nothing else."""
    others = [
        tmp_path / arena_name(APP, "ctx-10", "b0"), tmp_path / arena_name(APP, "ctx", "b0"),
        tmp_path / arena_name(f"{APP}-ctx", "1", "b0"), tmp_path / "psm_of_another_program",
        tmp_path / f"tailrace-{APP}-ctx%2d1-x-y", tmp_path / f"tailrace-{APP}-ctx%2d1",
    ]  # fmt: skip
    for path in others:
        path.write_bytes(b"theirs")
    reader, writer = os.pipe()
    for boot in range(20):
        worker = FORK.Process(target=_boot, args=(f"b{boot}", tmp_path, writer))
        worker.start()
        assert os.read(reader, 1) == b"x"
        ours = [p for p in tmp_path.iterdir() if p not in others]
        assert len(ours) == 1, "the region of the boot before is gone"
        worker.kill()
        worker.join()
    assert [p.read_bytes() for p in others] == [b"theirs"] * len(others)
    os.close(reader), os.close(writer)


def _boot(boot: str, directory: Path, ready: int) -> None:
    unlink_earlier(APP, "ctx-1", directory)
    _own(arena_name(APP, "ctx-1", boot), directory, ready)


def test_a_region_that_does_not_fit_is_refused_naming_both_sizes_and_leaves_nothing():
    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    num_pages = free // LAYOUT.bytes_per_page + 2
    name = arena_name(APP, "big", "b1")
    with pytest.raises(ConfigError, match="shared memory") as refused:
        Arena.create(name, LAYOUT, num_pages)
    needed, found = (int(word) for word in str(refused.value).split() if word.isdigit())
    assert needed > num_pages * LAYOUT.bytes_per_page > found > free // 2
    assert not (SHARED_MEMORY / name).exists()


def test_room_that_vanishes_between_the_question_and_the_answer_is_no_bus_error(tmp_path, monkeypatch):
    def no_room(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(ConfigError, match="needs"):
        Arena.create(arena_name(APP, "w", "b1"), LAYOUT, 9, tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_the_room_is_taken_at_the_start(arena):
    status = os.stat(SHARED_MEMORY / arena.name)
    assert status.st_blocks * 512 >= status.st_size > 9 * LAYOUT.bytes_per_page


def test_two_workers_of_one_name_and_boot_are_refused(arena):
    arena.pages[1] = 9
    with pytest.raises(ConfigError, match="exists already"):
        Arena.create(arena.name, LAYOUT, 9)
    assert (arena.pages[1] == 9).all()


@pytest.mark.parametrize("name", ["tailrace-a-b", "other-a-b-c", "tailrace-a-b-../x", "tailrace-a-b-c/d", ""])
def test_only_arena_names_are_made_and_opened(name):
    with pytest.raises(ConfigError, match="arena name"):
        Arena.create(name, LAYOUT, 9)
    with pytest.raises(PeerError, match="arena name"):
        Arena.open_read_only(name)


def test_names_keep_application_worker_and_boot_apart():
    names = {
        arena_name("a-b", "c", "d"),
        arena_name("a", "b-c", "d"),
        arena_name("a", "b", "c-d"),
        arena_name("a/b", "c", "d"),
    }
    assert len(names) == 4 and all(n.count("-") == 3 and "/" not in n for n in names)
    with pytest.raises(ConfigError):
        arena_name("a", "", "c")


@pytest.mark.parametrize("damage", ["missing", "empty", "foreign", "short", "link"])
def test_a_file_that_is_no_arena_is_refused(damage, tmp_path):
    name = arena_name(APP, "w", "b1")
    path = tmp_path / name
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        path.write_bytes(b"x" * 10_000)
    elif damage in ("short", "link"):
        Arena.create(name, LAYOUT, 9, tmp_path)
        if damage == "short":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PeerError, match=name):
        Arena.open_read_only(name, tmp_path)


def test_known_bytes_that_differ_are_seen(tmp_path):
    name = arena_name(APP, "w", "b1")
    Arena.create(name, LAYOUT, 9, tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[1000] ^= 1
    (tmp_path / name).write_bytes(data)
    assert not Arena.open_read_only(name, tmp_path).is_readable()


def test_closing_leaves_arrays_that_are_still_used_readable(arena):
    peer = Arena.open_read_only(arena.name)
    arena.pages[2] = 5
    kept = peer.pages[2]
    peer.close()
    assert peer.num_pages == 0 and (kept == 5).all()


def test_no_resource_tracker_stands_behind_an_arena(tmp_path):
    """A peer that ends in good order must not take the owner's memory with it."""
    name = arena_name(APP, "w", "b1")
    arena = Arena.create(name, LAYOUT, 9, tmp_path)
    arena.pages[1] = 3
    program = (
        "import sys; from pathlib import Path; from tailrace.kv_cache.arena import Arena\n"
        "arena = Arena.open_read_only(sys.argv[1], Path(sys.argv[2])); print(int(arena.pages[1].sum()))\n"
        "print('multiprocessing.resource_tracker' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, name, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(3 * LAYOUT.bytes_per_page), "False"] and not done.stderr
    assert (tmp_path / name).exists() and int(np.asarray(arena.pages[1]).sum()) == 3 * LAYOUT.bytes_per_page


# ----------------------------------------------------------------------------------------------- the ranks of a worker


def test_the_arenas_of_a_group_share_one_row_of_generation_numbers(tmp_path):
    names = [arena_name(APP, "w", "b1", rank) for rank in range(3)]
    group = ArenaGroup.create(names, LAYOUT, 9, tmp_path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == sorted(names) and len(set(names)) == 3
    own = Arena.open_own(names[2], tmp_path)
    own.pages[3] = 5
    group.pages[1][3] = 7
    group.generations[3] = 11
    peer = ArenaGroup.open_read_only(names, tmp_path)
    assert [int(pages[3].sum()) for pages in peer.pages] == [n * LAYOUT.bytes_per_page for n in (0, 7, 5)]
    assert int(peer.generations[3]) == 11 and peer.is_readable()
    assert not len(own.generations) and peer.bytes_per_page == (LAYOUT.bytes_per_page,) * 3
    for pages in peer.pages:
        with pytest.raises(ValueError, match="read-only"):
            pages[0] = 1
    group.unlink()
    assert not list(tmp_path.iterdir())


def test_a_group_that_does_not_fit_together_is_not_mapped(tmp_path):
    one = ArenaGroup.create([arena_name(APP, "w", "b1", rank) for rank in range(2)], LAYOUT, 9, tmp_path)
    other = ArenaGroup.create([arena_name(APP, "v", "b1", rank) for rank in range(2)], LAYOUT, 8, tmp_path)
    for names in (one.names[::-1], (one.names[0], other.names[1]), (one.names[0], other.names[0]), ()):
        with pytest.raises(PeerError, match="not the arenas of one worker|at least one arena"):
            ArenaGroup.open_read_only(names, tmp_path)


def test_a_group_that_cannot_be_made_whole_leaves_nothing(tmp_path):
    names = [arena_name(APP, "w", "b1", rank) for rank in range(2)]
    (tmp_path / names[1]).write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="exists already"):
        ArenaGroup.create(names, LAYOUT, 9, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [names[1]]


def test_the_next_boot_removes_the_arenas_of_all_ranks(tmp_path):
    """B20 with a group: SIGKILL of all ranks leaves one region a rank."""
    names = [arena_name(APP, "ctx-1", "b1", rank) for rank in range(4)]
    other = ArenaGroup.create([arena_name(APP, "ctx-11", "b1", rank) for rank in range(2)], LAYOUT, 9, tmp_path)
    ArenaGroup.create(names, LAYOUT, 9, tmp_path)
    assert sorted(unlink_earlier(APP, "ctx-1", tmp_path)) == sorted(names)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(other.names)
