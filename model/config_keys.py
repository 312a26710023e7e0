"""Typed look-ups in a config.json of any family: a wrong value raises ConfigError naming the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tailrace.model.config import Rope, RopeKind
from tailrace.model.errors import ConfigError


class Keys:
    """Look-ups that name the file and the key when they fail. `null` counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def real(self, key: str, default: float | None = None, least: float | None = None) -> float:
        """A finite number, at least `least` if that is given."""
        value = self._raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: {key} is missing")
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:  # a whole number beyond every float
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"{self._where}: {key} is {repr(value)[:80]}, expected a number")
        if least is not None and number < least:
            raise ConfigError(f"{self._where}: {key} is {number}, must be at least {least}")
        return number

    def integer(self, key: str, default: int | None = None, least: int | None = None) -> int:
        """A whole number, at least `least` if that is given."""
        value = self.real(key, default)
        if value != int(value):
            raise ConfigError(f"{self._where}: {key} is {value!r}, expected a whole number")
        if least is not None and value < least:
            raise ConfigError(f"{self._where}: {key} is {int(value)}, must be at least {least}")
        return int(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._raw.get(key)
        if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
            raise ConfigError(f"{self._where}: {key} is {value!r}, expected a list of whole numbers")
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key} is {value!r}, expected true or false")
        return value

    def only(self, key: str, *values: Any) -> None:
        """The key is absent, or one of the values that are supported; the first is the family's own default."""
        value = self._raw.get(key)
        if value is not None and value not in values:
            supported = ", ".join(repr(v) for v in values)
            raise ConfigError(f"{self._where}: {key} {value!r} is not supported, only {supported}")


def parse_rope(raw: Mapping[str, Any], max_position: int, where: str) -> Rope:
    """Rotary settings, from `rope_parameters` or the older `rope_scaling` beside `rope_theta`."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"{where}: rope_scaling is {scaling!r}, expected an object")
    if any(isinstance(v, dict) for v in scaling.values()):
        raise ConfigError(f"{where}: rope parameters that differ by layer type are not supported")
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    supported = [k.value for k in RopeKind if k is not RopeKind.FACTORS]
    if name not in supported:
        raise ConfigError(f"{where}: rope type {name!r} is not supported; supported: {', '.join(supported)}")
    number = Keys(scaling, f"{where}: rope")
    theta = number.real("rope_theta", Keys(raw, where).real("rope_theta", 10000.0))
    partial = number.real("partial_rotary_factor", Keys(raw, where).real("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor {partial} is not supported, only 1.0")
    original = raw.get("original_max_position_embeddings")
    if original is None:
        original = scaling.get("original_max_position_embeddings")
    original = Keys({"original_max_position_embeddings": original}, f"{where}: rope").integer(
        "original_max_position_embeddings", max_position, least=1
    )
    settings = _rope_settings(RopeKind(name), scaling, number, max_position, original)
    try:
        return Rope(RopeKind(name), theta, **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _rope_settings(
    kind: RopeKind, scaling: Mapping[str, Any], number: Keys, max_position: int, original: int
) -> dict[str, Any]:
    """What a kind of rope has beside its theta."""
    if kind is RopeKind.DEFAULT:
        return {}
    if kind is RopeKind.LINEAR:
        return {"factor": number.real("factor")}
    if kind is RopeKind.LLAMA3:
        return {
            "factor": number.real("factor"),
            "original_max_position": original,
            "low_freq_factor": number.real("low_freq_factor"),
            "high_freq_factor": number.real("high_freq_factor"),
        }
    factor = number.real("factor", max_position / original)
    return {
        "factor": factor,
        "original_max_position": original,
        # A zero counts as unset, as it does for transformers.
        "beta_fast": number.real("beta_fast", 32.0) or 32.0,
        "beta_slow": number.real("beta_slow", 1.0) or 1.0,
        "truncate": bool(scaling.get("truncate", True)),
        "attention_factor": _yarn_attention_factor(scaling, number, factor),
    }


def _yarn_attention_factor(scaling: Mapping[str, Any], number: Keys, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return number.real("attention_factor")
    mscale, mscale_all_dim = number.real("mscale", 0.0), number.real("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much yarn sharpens attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
