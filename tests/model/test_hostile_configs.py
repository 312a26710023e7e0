"""config.json of the published models with one value broken: refused with the file named, or read; no traceback."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES
from tailrace.model.row_groups import RowPages
from tailrace.model.safetensors_files import read_directory
from tailrace.model.source import family_of
from tests.model.published import PUBLISHED, V3, published_config

BROKEN: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 7, 1.5, 10**9, -(10**30), 10**400, float("nan"), float("inf"), "", "yarn", "4",
    [], [0], [[]], [None], [-1, 4], [1] * 5000, {}, {"rope_type": "yarn"}, {"main": None}, {"a": {}},
)  # fmt: skip
ABSENT = object()


def paths(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of every key of nested objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key)
            yield from paths(inner, (*at, key))


def changed(raw: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    result = copy.deepcopy(raw)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_one_broken_value_is_refused_by_name_or_leaves_a_model_with_pages(name: str):
    raw = published_config(name)
    raw.pop("vision_config", None)
    family = FAMILIES[raw["model_type"]]
    wrong, refused = [], 0
    for path in paths(raw):
        for value in (ABSENT, *BROKEN):
            if path == ("model_type",) and value is not ABSENT:
                continue
            shown = "absent" if value is ABSENT else repr(value)[:40]
            try:
                config = family.parse(changed(raw, path, value), "here/config.json")
                for dtype in ("float32", "bfloat16"):
                    groups = config.row_groups(dtype)
                    period = math.lcm(*(g.tokens_per_row for g in groups), *(g.period or 1 for g in groups))
                    assert RowPages(groups, period).bytes_per_page > 0
            except ConfigError as error:
                refused += 1
                if "here/config.json" not in str(error):
                    wrong.append(f"{'.'.join(path)} = {shown}: {error}")
            except Exception as error:  # noqa: BLE001  whatever else comes out is what is looked for
                wrong.append(f"{'.'.join(path)} = {shown}: {type(error).__name__}: {error}"[:200])
    assert wrong == []
    assert refused > 300


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", '{"model_type": {}}', '{"model_type": []}', '{"model_type": null}']
)
def test_a_file_that_is_no_config_is_of_no_family_or_refused(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    try:
        assert family_of(str(tmp_path)) is None
    except ConfigError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize("text", ["9" * 5000, '{"a": ' + "9" * 5000 + "}", "[" * 100_000])
def test_json_that_python_cannot_hold_is_refused_with_the_file_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        family_of(str(tmp_path))
    size = len(text).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(size + text.encode())
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        read_directory(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json: cannot be read"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", -1e-6), ("rope_theta", 1), ("beta_fast", -2), ("beta_slow", -1)]
)
def test_numbers_that_would_fail_in_a_step_or_at_loading_are_refused_at_once(key: str, value: float):
    raw = published_config(V3)
    (raw["rope_scaling"] if key.startswith("beta") else raw)[key] = value
    with pytest.raises(ConfigError, match=f"here/config.json: .*{key.removeprefix('rope_')} {value:.1f}|{key} is"):
        FAMILIES["deepseek_v3"].parse(raw, "here/config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_written_as_other_writers_write_them_are_the_same_config(name: str):
    raw = published_config(name)
    family = FAMILIES[raw["model_type"]]
    inner = raw.get("text_config", raw)
    floats = {key: float(value) if type(value) is int else value for key, value in inner.items()}
    assert family.parse(raw | {"text_config": floats} if inner is not raw else floats, "x") == family.parse(raw, "x")
