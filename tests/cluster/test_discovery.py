"""Entries that processes find each other by, and the secret they share."""

import threading

import pytest

from tailrace.cluster.discovery import FileDirectory, shared_secret


def test_an_entry_is_found_replaced_and_withdrawn(tmp_path):
    directory = FileDirectory(tmp_path / "d")
    assert directory.lookup("router") is None
    directory.publish("router", {"port": 1})
    directory.publish("router", {"port": 2})
    assert FileDirectory(tmp_path / "d").lookup("router") == {"port": 2}
    directory.publish("worker.ctx-0", {})
    assert directory.names("worker.") == ["worker.ctx-0"]
    directory.withdraw("router")
    directory.withdraw("router")
    assert directory.lookup("router") is None


def test_the_first_of_many_writers_decides(tmp_path):
    directory = FileDirectory(tmp_path)
    secrets: list[bytes] = []
    threads = [threading.Thread(target=lambda: secrets.append(shared_secret(directory, None))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64


def test_a_configured_secret_is_taken_as_it_is(tmp_path):
    directory = FileDirectory(tmp_path)
    assert shared_secret(directory, "a-configured-secret") == b"a-configured-secret"
    assert directory.names("") == []


def test_the_secrets_file_is_for_its_owner_only(tmp_path):
    shared_secret(FileDirectory(tmp_path), None)
    assert (tmp_path / "secret.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["", "a/b", "..\x00", "a" * 200])
def test_a_name_that_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no directory name"):
        FileDirectory(tmp_path).publish(name, {})
