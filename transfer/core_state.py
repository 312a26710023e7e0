"""A protocol core's whole state as a value: taken out of one core, put into another of the same class.

For the flight recorder, whose recordings begin with one, and for tests that look at every reachable state. What a core
was built from (books, wire, configuration) is no state. Walks over whatever attributes a core has, so a new one needs
nothing here. Frames and other frozen data are shared, all else is copied. Pure; nothing of it runs while a core works.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from functools import cache
from typing import Any

GIVEN = frozenset({"_kv", "_wire", "_config", "_headroom_pages", "_handlers"})  # attributes made by __init__ alone

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


def capture(core: Any) -> dict[str, Any]:
    """A copy of everything that handling events changes in a core, by attribute."""
    memo: dict[int, Any] = {}
    return {name: copied(value, memo) for name, value in vars(core).items() if name not in GIVEN}


def install(core: Any, state: dict[str, Any]) -> None:
    """Make a core, just built, what `capture` was taken from. The state is copied and may be used again.

    Raises:
        ValueError: the core has other attributes: the state is of another class or version.
    """
    expected = {name for name in vars(core) if name not in GIVEN}
    if expected != set(state):
        differing = ", ".join(sorted(expected ^ set(state)))
        raise ValueError(f"{type(core).__name__} and the state differ in the attributes {differing}")
    memo: dict[int, Any] = {}
    vars(core).update({name: copied(value, memo) for name, value in state.items()})


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of containers and mutable objects, cycles and shared objects kept; what cannot change is shared.

    Args:
        memo: original's id -> copy, of one walk.
    """
    kind = type(value)
    if kind in _PLAIN or is_frozen(kind):
        return value
    if kind is tuple:
        return value if all(type(v) in _PLAIN for v in value) else _copied_tuple(value, memo)
    known = memo.get(id(value))
    return _copied_container(value, kind, memo) if known is None else known


def _copied_tuple(value: tuple[Any, ...], memo: dict[int, Any]) -> tuple[Any, ...]:
    new = tuple([copied(v, memo) for v in value])
    return value if all(a is b for a, b in zip(new, value, strict=True)) else new


def _copied_container(value: Any, kind: type, memo: dict[int, Any]) -> Any:
    if kind is dict or kind is OrderedDict:
        new: Any = kind()
        memo[id(value)] = new
        for key, item in value.items():
            new[key] = item if is_frozen(type(item)) else copied(item, memo)
    elif kind is defaultdict:
        new = defaultdict(value.default_factory)
        memo[id(value)] = new
        new.update((key, copied(item, memo)) for key, item in value.items())
    elif kind is list or kind is deque:
        new = memo[id(value)] = kind()
        new.extend([copied(item, memo) for item in value])
    elif kind is set or kind is frozenset:
        new = memo[id(value)] = kind([copied(item, memo) for item in value]) if value else kind()
    elif kind is bytearray:
        new = memo[id(value)] = bytearray(value)
    else:
        new = memo[id(value)] = object.__new__(kind)
        for name, item in attributes(value):
            object.__setattr__(new, name, copied(item, memo))
    return new


@cache
def is_frozen(kind: type) -> bool:
    """Whether values of a class never change: frozen dataclasses, enums, named tuples, functions."""
    if dataclasses.is_dataclass(kind):
        return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    return issubclass(kind, Enum) or (issubclass(kind, tuple) and kind is not tuple) or kind.__name__ == "function"


@cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


def attributes(value: Any) -> list[tuple[str, Any]]:
    """An object's attributes by name, in a fixed order, wherever its class keeps them."""
    named = [(name, getattr(value, name)) for name in _slots(type(value)) if hasattr(value, name)]
    return named + list(getattr(value, "__dict__", {}).items())


def look(core: Any) -> dict[str, Any]:
    """A core's attributes as they are, not copied: to be read between two events and not kept."""
    return vars(core)
