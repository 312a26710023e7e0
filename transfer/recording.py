"""The file of a flight recording: header, starting state and entries, as msgpack; and what is left out of it.

    header     version, worker, boot, duty, configuration of the core, layout, reason of the dump
    start      the cores' states and the pool's columns when the oldest entry was made
    entries    in the order in which things happened, of both threads
        Handled   an event that a core was given, what books and wire answered it meanwhile, what kinds of action came
        Changed   a change of the page pool, by the core or by the worker's loop

No prompt, no token, no logprob and no sampling parameter but max_tokens is in a recording: `redacted` takes them out of
the few events that carry them and keeps lengths, so that the cores do the same with what is left. Request ids are made
by the ingress, block hashes need the cluster's secret; both are kept. Pure; knows no file but its bytes.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

import msgpack

from tailrace.kv_cache import layout, manager, pool
from tailrace.model import row_groups, sampling_params, state_groups
from tailrace.model.errors import ConfigError
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer import (
    attempt,
    bitmap,
    core_events,
    hand,
    leases,
    loop_events,
    messages,
    orphans,
    page_list,
    page_plan,
    request_state,
    runs,
    source_sums,
    verify,
)
from tailrace.transfer.core_events import FromIngress, FromPeer, PrefillDone
from tailrace.transfer.core_state import attributes
from tailrace.transfer.loop_events import FirstToken
from tailrace.transfer.messages import Handoff, Submit
from tailrace.transfer.page_list import PageList, UnitList
from tailrace.transfer.transports import base

MAGIC = b"tailrace recording 1\n"
_MODULES = (attempt, bitmap, core_events, hand, leases, loop_events, messages, orphans, page_list, page_plan, base,
            request_state, runs, source_sums, verify, sampling_params, state_groups, row_groups, layout, manager,
            pool)  # fmt: skip
_CLASSES = {
    name: cls
    for module in _MODULES
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if cls.__module__.startswith("tailrace.")
}
_SEQUENCES: dict[type, str] = {tuple: "t", list: "l", set: "s", frozenset: "f", deque: "q"}
_BY_TAG = {tag: kind for kind, tag in _SEQUENCES.items()}
_PLAIN = (int, float, str, bytes, bool, type(None))


@dataclass(slots=True)
class Handled:
    """`core`: ctx | gen. `answers`: (method, pages asked about, result) of books and wire, in order. `writes`: (read,
    our pages that it may write)."""

    core: str
    now: float
    event: Any
    answers: list[tuple[str, tuple[int, ...], Any]] = field(default_factory=list)
    actions: tuple[str, ...] = ()
    writes: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(slots=True)
class Changed:
    """`change`: a method of PagePool; `what`: its pages, or their number. `by_core`: else by the worker's loop."""

    change: str
    what: tuple[int, ...] | int
    by_core: bool


@dataclass(slots=True)
class Recording:
    """A recording in memory; see the module."""

    header: dict[str, Any]
    cores: dict[str, dict[str, Any]]
    columns: dict[str, list[int]]
    entries: list[Handled | Changed]


_ABOUT_PAGES = frozenset({"release", "unpin", "quarantine", "end_quarantine", "hold", "pin"})


def asked_of(method: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """What a change of the books is about, as a recording keeps it; nothing for a question."""
    return tuple(args[0]) if method in _ABOUT_PAGES else ()


_CLASSES |= {"Handled": Handled, "Changed": Changed}


def redacted(event: Any) -> Any:
    """The event without what a client wrote or was answered; ids become as many zeros."""
    if isinstance(event, FromIngress) and isinstance(event.frame, Submit):
        return FromIngress(_bare_submit(event.frame))
    if isinstance(event, FromPeer) and isinstance(event.frame, Handoff):
        return FromPeer(event.boot, _bare_handoff(event.frame))
    if isinstance(event, PrefillDone):
        firsts = tuple(FirstToken(0, None, first.finish) for first in event.result.firsts)
        return PrefillDone(event.key, replace(event.result, firsts=firsts, prompt_logprobs=()))
    return event


def _bare_submit(frame: Submit) -> Submit:
    return replace(
        frame,
        prompt_ids=bytes(len(frame.prompt_ids)),
        output_ids=bytes(len(frame.output_ids)),
        params=SamplingParams(max_tokens=frame.params.max_tokens),
        scope="",
    )


def _bare_handoff(frame: Handoff) -> Handoff:
    return replace(
        frame,
        first_tokens=(0,) * len(frame.first_tokens),
        tail_ids=bytes(len(frame.tail_ids)),
        output_ids=bytes(len(frame.output_ids)),
        counts={},
        params=SamplingParams(max_tokens=frame.params.max_tokens),
        scope="",
    )


# ------------------------------------------------------------------------------------------------------------- as bytes


def dump(recording: Recording) -> bytes:
    """As the bytes of a file.

    Raises:
        TypeError: a core's state holds a class that no module of the protocol defines.
    """
    parts = [_plain(getattr(recording, f.name), {}) for f in dataclasses.fields(Recording)]
    return MAGIC + zlib.compress(cast(bytes, msgpack.packb(parts, use_bin_type=True)), 1)


def load(data: bytes) -> Recording:
    """Inverse of `dump`.

    Raises:
        ConfigError: no recording, or one of another version.
    """
    if not data.startswith(MAGIC):
        raise ConfigError("this is no flight recording, or one of another version")
    try:
        parts = msgpack.unpackb(zlib.decompress(data[len(MAGIC) :]), raw=False, strict_map_key=False)
        return Recording(*(_object(part, []) for part in parts))
    except (zlib.error, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ConfigError(f"the recording cannot be read, or was made by another version: {error}") from error


def _plain(value: Any, memo: dict[int, int]) -> Any:
    """Tagged lists of plain values. `memo`: mutable objects seen, so that one that is shared stays one."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *[_plain(v, memo) for v in value]]
    if kind is dict or kind is OrderedDict:
        items = [_plain(part, memo) for pair in value.items() for part in pair]
        return ["d" if kind is dict else "o", *items]
    if kind is PageList:
        return ["P", value.packed()]
    if kind is UnitList:
        return ["U", value.src.packed(), value.dst.tolist()]
    if _CLASSES.get(kind.__name__) is not kind:
        raise TypeError(f"a recording cannot hold a {kind.__module__}.{kind.__name__}")
    if isinstance(value, Enum):
        return ["e", kind.__name__, value.value]
    if isinstance(value, tuple):
        return ["n", kind.__name__, *[_plain(v, memo) for v in value]]
    if id(value) in memo:
        return ["@", memo[id(value)]]
    memo[id(value)] = len(memo)
    return ["c", kind.__name__, *[part for name, item in attributes(value) for part in (name, _plain(item, memo))]]


def _object(value: Any, known: list[Any]) -> Any:
    if type(value) is not list:
        return value
    tag, *rest = value
    if tag in _BY_TAG:
        return _BY_TAG[tag]([_object(v, known) for v in rest])
    if tag in ("d", "o"):
        parts = [_object(v, known) for v in rest]
        return (dict if tag == "d" else OrderedDict)(zip(parts[::2], parts[1::2], strict=True))
    if tag == "P":
        return PageList.unpack(rest[0])
    if tag == "U":
        return UnitList.of([(page, to) for page, to in zip(PageList.unpack(rest[0]), rest[1], strict=True)])
    if tag == "@":
        return known[rest[0]]
    cls: Any = _CLASSES[rest[0]]
    if tag == "e":
        return cls(rest[1])
    if tag == "n":
        return cls(*[_object(v, known) for v in rest[1:]])
    new = object.__new__(cls)
    known.append(new)
    for name, item in zip(rest[1::2], rest[2::2], strict=True):
        object.__setattr__(new, name, _object(item, known))
    return new
