"""Frames as bytes: a 4-byte big-endian length, then one msgpack array `[kind name, field, field, ...]`, positional.

For each class of `messages.FRAMES`, and for each dataclass inside one, an encoder and a decoder are generated once, at
import, as source from the annotations (as `dataclasses` generates `__init__`): on the token path a generic walk over
type hints costs several times as much. Both check types: a wrong value is found at its sender, where it fails one call,
before it could close the receiver's link with everything that is multiplexed on it.

Knows no socket (links.py) and no meaning of any frame. `Decoder` is stateful: after an error it stays broken, and its
link must be closed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import msgpack

from tailrace.model.errors import ProtocolError
from tailrace.transfer import messages
from tailrace.transfer.page_list import PageList

MAX_FRAME_BYTES = 64 << 20
MAX_ITEMS = 1 << 21  # of one array or map: above the pages or prompt logprobs of the longest prompt
PREFIX_BYTES = 4

_SCALARS: dict[type, str] = {str: "str", bytes: "bytes", int: "int", float: "float", bool: "bool"}


# ------------------------------------------------------------------------------------------------------ code generation


def _wrong(where: str, expected: str, value: object) -> NoReturn:
    raise ProtocolError(f"{where}: expected {expected}, got {type(value).__name__}")


def _pack_pages(where: str, value: Any) -> bytes:
    try:
        return PageList.of(value).packed()
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"{where}: no list of pages ({error})") from None


def _unpack_pages(where: str, value: object) -> PageList:
    if type(value) is not bytes:
        _wrong(where, "bytes", value)
    try:
        return PageList.unpack(value)
    except ValueError as error:
        raise ProtocolError(f"{where}: {error}") from None


class _Source:
    """Writes one function that checks a value of a type hint and converts it, statement by statement.

    `decode` True: from msgpack's values (tuples, exact types) to dataclasses; False: the other way, where subclasses
    (enums, numpy floats) and lists in place of tuples are accepted.
    """

    def __init__(self, decode: bool) -> None:
        self.decode, self.lines, self.names = decode, [], 0

    def emit(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def name(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def convert(self, hint: Any, var: str, where: str, depth: int) -> None:
        """Emit code that replaces the variable `var` by its converted value, or raises naming `where`."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint in _SCALARS:
            self._scalar(hint, var, where, depth)
        elif hint is PageList:
            self.emit(depth, f"{var} = {'unpack_pages' if self.decode else 'pack_pages'}({where!r}, {var})")
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            self.emit(depth, f"{var} = {_function_name(hint, self.decode)}({var})")
        elif origin in (types.UnionType, typing.Union) and len(args) == 2 and type(None) in args:
            self.emit(depth, f"if {var} is not None:")
            self.convert(next(a for a in args if a is not type(None)), var, where, depth + 1)
        elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            self._sequence(args[0], var, where, depth)
        elif origin is tuple:
            self._record(args, var, where, depth)
        elif origin is dict:
            self._mapping(args[0], args[1], var, where, depth)
        else:
            raise TypeError(f"{where}: a frame cannot hold {hint!r}")

    def _scalar(self, hint: type, var: str, where: str, depth: int) -> None:
        name = _SCALARS[hint]
        fail = f"wrong({where!r}, {name!r}, {var})"
        self.emit(depth, f"if type({var}) is not {name}:")
        if hint is float:
            number = f"type({var}) is int" if self.decode else f"isinstance({var}, (int, float)) and {var} is not True"
            self.emit(depth + 1, f"if not ({number}) or {var} is False: {fail}")
            self.emit(depth + 1, f"{var} = float({var})")
        elif self.decode or hint is bool:
            self.emit(depth + 1, fail)
        elif hint is bytes:
            self.emit(depth + 1, f"if not isinstance({var}, (bytes, bytearray)): {fail}")
        else:
            extra = f" or isinstance({var}, bool)" if hint is int else ""
            self.emit(depth + 1, f"if not isinstance({var}, {name}){extra}: {fail}")

    def _check_sequence(self, var: str, where: str, depth: int) -> None:
        check = f"type({var}) is not tuple" + ("" if self.decode else f" and type({var}) is not list")
        self.emit(depth, f"if {check}: wrong({where!r}, 'array', {var})")

    def _sequence(self, item: Any, var: str, where: str, depth: int) -> None:
        self._check_sequence(var, where, depth)
        element = self.name()
        if item in _SCALARS and item is not float:  # nothing to convert: only look at each
            self.emit(depth, f"for {element} in {var}:")
            self._scalar(item, element, where, depth + 1)
            return
        out = self.name()
        self.emit(depth, f"{out} = []")
        self.emit(depth, f"for {element} in {var}:")
        self.convert(item, element, where, depth + 1)
        self.emit(depth + 1, f"{out}.append({element})")
        self.emit(depth, f"{var} = tuple({out})" if self.decode else f"{var} = {out}")

    def _record(self, items: tuple[Any, ...], var: str, where: str, depth: int) -> None:
        self._check_sequence(var, where, depth)
        self.emit(depth, f"if len({var}) != {len(items)}: wrong({where!r}, 'array of {len(items)}', {var})")
        elements = [self.name() for _ in items]
        self.emit(depth, f"{', '.join(elements)}, = {var}")
        for item, element in zip(items, elements, strict=True):
            self.convert(item, element, where, depth)
        self.emit(depth, f"{var} = ({', '.join(elements)},)")

    def _mapping(self, key: Any, value: Any, var: str, where: str, depth: int) -> None:
        self.emit(depth, f"if type({var}) is not dict: wrong({where!r}, 'map', {var})")
        k, v, out = self.name(), self.name(), self.name()
        self.emit(depth, f"{out} = {{}}")
        self.emit(depth, f"for {k}, {v} in {var}.items():")
        self.convert(key, k, where, depth + 1)
        self.convert(value, v, where, depth + 1)
        self.emit(depth + 1, f"{out}[{k}] = {v}")
        self.emit(depth, f"{var} = {out}")

    def function(self, cls: type) -> str:
        """Source of the function for one dataclass; fields in declaration order."""
        hints = typing.get_type_hints(cls)
        fields = [(f"f{i}", field.name) for i, field in enumerate(dataclasses.fields(cls))]
        self.emit(0, f"def {_function_name(cls, self.decode)}(value):")
        if self.decode:
            expected = f"'array of {len(fields)}'"
            self.emit(1, f"if type(value) is not tuple or len(value) != {len(fields)}:")
            self.emit(2, f"wrong({cls.__name__!r}, {expected}, value)")
            self.emit(1, f"{', '.join(var for var, _ in fields)}, = value")
        else:
            self.emit(1, f"if type(value) is not {cls.__name__}: wrong({cls.__name__!r}, {cls.__name__!r}, value)")
        for var, name in fields:
            if not self.decode:
                self.emit(1, f"{var} = value.{name}")
            self.convert(hints[name], var, f"{cls.__name__}.{name}", 1)
        values = ", ".join(var for var, _ in fields)
        self.emit(1, f"return {cls.__name__}({values})" if self.decode else f"return ({values},)")
        return "\n".join(self.lines)


def _function_name(cls: type, decode: bool) -> str:
    return f"{'decode' if decode else 'encode'}_{cls.__name__}"


def _nested(hint: Any) -> Iterator[type]:
    """Every dataclass in a type hint, itself included."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from _nested(inner)
    for arg in typing.get_args(hint):
        yield from _nested(arg)


def _generate(frames: tuple[type, ...]) -> dict[str, Any]:
    classes = {cls.__name__: cls for frame in frames for cls in _nested(frame)}
    namespace: dict[str, Any] = {
        **classes, "wrong": _wrong, "pack_pages": _pack_pages, "unpack_pages": _unpack_pages,
    }  # fmt: skip
    for cls in classes.values():
        for decode in (False, True):
            exec(_Source(decode).function(cls), namespace)  # our own source, from our own classes
    return namespace


_namespace = _generate(messages.FRAMES)
_encoders: dict[type, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    cls: (cls.__name__, _namespace[_function_name(cls, False)]) for cls in messages.FRAMES
}
_decoders: dict[str, Callable[[Any], object]] = {
    cls.__name__: _namespace[_function_name(cls, True)] for cls in messages.FRAMES
}


# ------------------------------------------------------------------------------------------------------------ interface


def pack(frame: object) -> bytes:
    """A frame without its length prefix, e.g. as a NIXL notification.

    Raises:
        ProtocolError: not a frame, or a field's value is not what its annotation says, or does not fit msgpack.
    """
    entry = _encoders.get(type(frame))
    if entry is None:
        raise ProtocolError(f"{type(frame).__name__} is no frame")
    kind, encoder = entry
    try:
        return cast(bytes, msgpack.packb((kind, *encoder(frame)), use_bin_type=True))
    except (ValueError, OverflowError, TypeError) as error:  # an int over 64 bits, a lone surrogate in a text
        raise ProtocolError(f"{kind} cannot be encoded: {error}") from error


def unpack(body: bytes | bytearray | memoryview) -> Any:
    """Inverse of `pack`.

    Raises:
        ProtocolError: malformed, of an unknown kind, or with a field of the wrong type or number.
    """
    try:
        value = msgpack.unpackb(
            body, raw=False, use_list=False, strict_map_key=False, max_ext_len=0,
            max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS,
        )  # fmt: skip
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed frame of {len(body)} bytes: {error or type(error).__name__}") from error
    if type(value) is not tuple or not value or type(value[0]) is not str:
        raise ProtocolError(f"malformed frame of {len(body)} bytes: no kind")
    decoder = _decoders.get(value[0])
    if decoder is None:
        raise ProtocolError(f"unknown kind of frame {value[0][:40]!r}")
    return decoder(value[1:])


def encode(frame: object, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """A frame with its length prefix, as it goes on a link.

    Raises:
        ProtocolError: as `pack`, and if the frame is longer than `max_bytes`.
    """
    body = pack(frame)
    if len(body) > max_bytes:
        raise ProtocolError(f"{type(frame).__name__} of {len(body)} bytes is over the bound of {max_bytes}")
    return len(body).to_bytes(PREFIX_BYTES, "big") + body


class Decoder:
    """Frames out of a byte stream that arrives in any pieces. Holds at most one frame's bytes, `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._error: ProtocolError | None = None

    def feed(self, data: bytes | bytearray) -> list[Any]:
        """All frames that `data` completes.

        Raises:
            ProtocolError: the stream is broken; frames that this same call had completed before are lost.
        """
        return list(self.frames(data))

    def frames(self, data: bytes | bytearray) -> Iterator[Any]:
        """As `feed`, one at a time: those before an error are yielded before it is raised. Must be exhausted."""
        if self._error is not None:
            raise self._error
        try:
            yield from self._frames(data)
        except ProtocolError as error:
            self._error = error
            self._buffer.clear()
            raise

    def _frames(self, data: bytes | bytearray) -> Iterator[Any]:
        if self._buffer:
            self._buffer += data
            source: bytes | bytearray = self._buffer
        else:
            source = data
        at, end = 0, len(source)
        while end - at >= PREFIX_BYTES:
            length = int.from_bytes(source[at : at + PREFIX_BYTES], "big")
            if length > self.max_bytes:
                raise ProtocolError(f"frame of {length} bytes is over the bound of {self.max_bytes}")
            if end - at - PREFIX_BYTES < length:
                break
            body = source[at + PREFIX_BYTES : at + PREFIX_BYTES + length]
            at += PREFIX_BYTES + length
            yield unpack(body)
        if source is self._buffer:
            del self._buffer[:at]
        else:
            self._buffer += source[at:]
