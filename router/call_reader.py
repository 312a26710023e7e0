"""One tool call's JSON object, read as it comes: is it still right, what is its name, where are its arguments.

A strict JSON reader that takes text in any pieces and looks at each character once. It finds a mistake at the character
that makes it one, so that what was read so far can be given back as text. Pure.
"""

from __future__ import annotations

import json
import re

_BLANK = " \n\r\t"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("+-.0123456789eEtrufalsn")


class Malformed(ValueError):
    """The text read so far begins no call."""


class CallReader:
    """See the module.

    Args:
        argument_keys: names that the member with the arguments may have.

    Attributes:
        text: all that was read.
        name: the function's, once it is known.
        arguments: (start, end) in `text`, end None while they run; None until they begin.
        done: the object is closed.
    """

    def __init__(self, argument_keys: tuple[str, ...]) -> None:
        self.text = ""
        self.name: str | None = None
        self.arguments: tuple[int, int | None] | None = None
        self.done = False
        self._keys = argument_keys
        self._stack: list[str] = []
        self._expect = "value"  # value | first_value | key | first_key | colon | next | string | escape | hex | scalar
        self._begin = 0  # of the string or scalar being read
        self._hex = 0
        self._is_key = False
        self._key = ""

    def push(self, text: str) -> int:
        """Read on; returns how many characters belong to the object.

        Raises:
            Malformed: none of this is a call; `text` holds all characters up to the one at fault.
        """
        start = len(self.text)
        self.text += text
        at = start
        while at < len(self.text) and not self.done:
            at = self._step(at)
        if self.done:
            self.text = self.text[:at]
        return at - start

    def _step(self, at: int) -> int:
        """Look at the character (or run of plain ones) at `at`; returns where to go on."""
        expect, char = self._expect, self.text[at]
        if expect == "string":
            return self._in_string(at)
        if expect == "escape":
            if char not in '"\\/bfnrtu':
                raise Malformed(f"escape {char!r}")
            self._expect, self._hex = ("hex", 4) if char == "u" else ("string", 0)
            return at + 1
        if expect == "hex":
            if char not in "0123456789abcdefABCDEF":
                raise Malformed(f"hex digit {char!r}")
            self._hex -= 1
            self._expect = "hex" if self._hex else "string"
            return at + 1
        if expect == "scalar":
            if char in _SCALAR_CHARS:
                return at + 1
            if not _SCALAR.fullmatch(self.text, self._begin, at):
                raise Malformed(f"value {self.text[self._begin : at][:20]!r}")
            self._value_ends(at)
            return at
        if char in _BLANK:
            return at + 1
        self._structure(at, char, expect)
        return at + 1

    def _in_string(self, at: int) -> int:
        found = _PLAIN.match(self.text, at)
        end = at if found is None else found.end()
        if end == len(self.text):
            return end
        char = self.text[end]
        if char == "\\":
            self._expect = "escape"
        elif char != '"':
            raise Malformed("a control character in a string")
        elif self._is_key:
            self._expect = "colon"
            if len(self._stack) == 1:  # keys inside the values say nothing
                self._key = json.loads(self.text[self._begin : end + 1])
        else:
            self._value_ends(end + 1)
        return end + 1

    def _structure(self, at: int, char: str, expect: str) -> None:
        if expect == "colon" and char == ":":
            self._expect = "value"
        elif expect == "next" and char == ",":
            self._expect = "key" if self._stack[-1] == "}" else "value"
        elif expect in ("next", "first_key", "first_value") and self._stack and char == self._stack[-1]:
            self._stack.pop()
            self._value_ends(at + 1)
        elif expect in ("key", "first_key") and char == '"':
            self._expect, self._begin, self._is_key = "string", at, True
        elif expect in ("value", "first_value"):
            self._value_begins(at, char)
        else:
            raise Malformed(f"{char!r} where {expect} is due")

    def _value_begins(self, at: int, char: str) -> None:
        depth = len(self._stack)
        if not depth and char != "{":
            raise Malformed("no object")
        if depth == 1 and self._key in self._keys:
            if char != "{" or self.arguments is not None:
                raise Malformed("arguments are no object")
            self.arguments = (at, None)
        elif depth == 1 and self._key == "name" and (char != '"' or self.name is not None):
            raise Malformed("the name is no text")
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._expect = "first_key" if char == "{" else "first_value"
        elif char == '"':
            self._expect, self._begin, self._is_key = "string", at, False
        elif char in _SCALAR_CHARS:
            self._expect, self._begin = "scalar", at
        else:
            raise Malformed(f"{char!r} begins no value")

    def _value_ends(self, end: int) -> None:
        self._expect = "next"
        if not self._stack:
            if self.name is None:
                raise Malformed("no name")
            self.done = True
        elif len(self._stack) == 1 and self._key == "name":
            self.name = json.loads(self.text[self._begin : end])
        elif len(self._stack) == 1 and self._key in self._keys and self.arguments is not None:
            self.arguments = (self.arguments[0], end)
