"""The command line: what it prints and how it exits. The serve command has its own tests (test_serve_command.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_tiny_checkpoint
from tiny_families import write_tiny_family

from tests.model.published import V32, published_config

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"


def tailrace(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tailrace.cluster.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_check_prints_derived_sizes():
    result = tailrace("check", str(MANIFESTS / "serve/local.yaml"))
    assert result.returncode == 0, result.stderr
    for text in ("2911 usable", "368640", "23040", "8192"):
        assert text in result.stdout


def test_check_prints_what_each_rank_holds(tmp_path):
    (tmp_path / "config.yaml").write_text(f"model: {write_tiny_checkpoint(tmp_path / 'm', 'llama')}\ngen: {{tp: 4}}\n")
    result = tailrace("check", str(tmp_path / "config.yaml"), env=os.environ | {"COLUMNS": "200"})
    assert result.returncode == 0, result.stderr
    assert "4, each with 1 of 2 key-value heads, 256.0 MiB" in result.stdout and "ctx ranks" not in result.stdout


def test_check_prints_what_of_a_prompt_is_left_to_gen_and_whether_that_is_exact(tmp_path):
    model, file = write_tiny_family(tmp_path / "m", "v41"), tmp_path / "config.yaml"
    for decoder, loss in ((40, "40, of them 40 through the upper layers: approximate (replay-40)"), (76, "exact")):
        mode = f"handoff_mode: bounded_replay_on_generation\nreplay: {{decoder: {decoder}}}\n"
        file.write_text(f"model: {model}\n{mode}")
        result = tailrace("check", str(file), env=os.environ | {"COLUMNS": "200"})
        assert result.returncode == 0 and loss in result.stdout, result.stderr
    file.write_text("model: smollm2\nhandoff_mode: bounded_replay_on_generation\n")
    result = tailrace("check", str(file))
    assert result.returncode == 2 and "family llama is none: use full" in result.stderr


def test_check_of_a_model_prints_its_state_groups():
    result = tailrace("check", "--model", "smollm2")
    assert result.returncode == 0, result.stderr
    for text in ("history", "30", "k 3x64, v 3x64", "23,040"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kv_byte: 1\n", "unknown key 'kv_byte'; did you mean 'kv_bytes'?"),
        ("ctx: {run_ahead: 1}\n", "key 'run_ahead' is a decode-only option"),
        ("applications: [{args: {gen: {replica: 1}}}]\n", "gen: unknown key 'replica'; did you mean 'replicas'?"),
        ("kv_bytes: 1MiB\n", "a scratch page and one block need 5"),
        ("model: /no/such/folder\n", "'/no/such/folder'"),
        ("- a\n", "not a mapping"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_named_and_no_traceback(tmp_path, text, complaint):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    for command in ("check", "serve"):
        result = tailrace(command, str(file))
        assert result.returncode == 2
        assert complaint in result.stderr
        assert "Traceback" not in result.stderr


def test_pools_larger_than_shared_memory_are_refused_before_anything_starts(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("kv_bytes: 1TiB\n")
    result = tailrace("serve", str(file))
    assert result.returncode == 2 and "all pools together take 2199023255552 bytes" in result.stderr


def test_status_of_nobody_is_one_line_and_exit_status_3():
    result = tailrace("status", "--url", "http://127.0.0.1:9")
    assert result.returncode == 3
    assert "http://127.0.0.1:9/cluster" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_of_nothing_says_what_to_name():
    result = tailrace("check")
    assert result.returncode == 2
    assert "name a FILE" in result.stderr


def test_check_of_a_config_alone_is_enough_and_a_wrong_one_names_the_key(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published_config(V32)))
    result = tailrace("check", "--model", str(tmp_path))
    assert result.returncode == 0 and "config.json alone" in result.stdout and "1,502" in result.stdout, result.stderr
    path.write_text(json.dumps(published_config(V32) | {"n_group": 7}))
    result = tailrace("check", "--model", str(tmp_path), "--tokens-per-page", "64")
    assert result.returncode == 2 and "config.json: n_group is 7" in result.stderr and "Traceback" not in result.stderr
