"""Tool calls in a model's text, found as the text comes: what is content, what is a call, and what only may be one.

    text, in any pieces -> ToolStream -> Content | CallStart | CallArguments

Nothing that may still become part of a call is given out as content, and what turns out not to be one is: no text is
lost. The three ways in which the served families write calls differ only in what stands around a call's JSON object:

    hermes    <tool_call> {"name": .., "arguments": {..}} </tool_call>      any number, text between them
    llama3    {"name": .., "parameters": {..}}; {..}       first in the message, or after <|python_tag|>
    mistral   [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]

A call must name a function that was offered; a JSON answer with a `name` is no call. Pure; one object a choice.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.router.call_reader import CallReader, Malformed

_BLANK = " \n\r\t"
_MISTRAL_ID = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family writes calls.

    Attributes:
        marker: begins a call, or a list of calls.
        bare: a message may begin with a call without the marker.
        opening, separator, closing: around and between the objects of a list; "" if there is none.
        ending: after each object.
        argument_keys: the first is what our grammars write.
    """

    name: str
    marker: str
    bare: bool = False
    opening: str = ""
    separator: str = ""
    closing: str = ""
    ending: str = ""
    argument_keys: tuple[str, ...] = ("arguments",)

    def new_id(self) -> str:
        """Mistral's templates want nine letters or digits; all others take OpenAI's form."""
        if self.name == "mistral":
            return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


DIALECTS = {
    "hermes": Dialect("hermes", "<tool_call>", ending="</tool_call>"),
    "llama3": Dialect(
        "llama3", "<|python_tag|>", bare=True, separator=";", argument_keys=("parameters", "arguments")
    ),
    "mistral": Dialect("mistral", "[TOOL_CALLS]", opening="[", separator=",", closing="]"),
}  # fmt: skip


def dialect_of(template: str | None) -> Dialect:
    """The dialect that a chat template teaches its model; hermes if it says nothing of calls."""
    text = template or ""
    if "<tool_call>" in text:
        return DIALECTS["hermes"]
    if "[TOOL_CALLS]" in text:
        return DIALECTS["mistral"]
    if "<|python_tag|>" in text or '"parameters":' in text:
        return DIALECTS["llama3"]
    return DIALECTS["hermes"]


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    index: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """`text`: the next part of the arguments' JSON."""

    index: int
    text: str


ToolEvent = Content | CallStart | CallArguments


class ToolStream:
    """Reads one choice.

    Args:
        names: the functions that may be called.
        parallel: False: calls after the first are left out.
        eager: give a call out as it is written, from its name on: a mistake after that leaves it broken. Else each is
            held until it is whole, and a broken one is content.

    Attributes:
        num_calls: calls given out.
    """

    def __init__(self, dialect: Dialect, names: Collection[str], *, parallel: bool = True, eager: bool = True) -> None:
        self.num_calls = 0
        self._dialect, self._names, self._parallel, self._eager = dialect, names, parallel, eager
        self._state = "start" if dialect.bare else "text"  # start | text | open | call | after | broken
        self._pending = ""  # not decided yet
        self._raw = ""  # of the call being read: what is content if it is none
        self._reader = CallReader(dialect.argument_keys)
        self._sent: int | None = None  # of the call's arguments; None before it was given out
        self._in_list = False  # behind the opening, where there is one
        self._events: list[ToolEvent] = []

    def feed(self, text: str) -> list[ToolEvent]:
        """Read on; returns what is decided now."""
        self._pending += text
        while self._pending and getattr(self, f"_{self._state}")():
            pass
        return self._take()

    def finish(self, *, cut: bool) -> list[ToolEvent]:
        """The text ends here. `cut`: in the middle (max_tokens): then a call whose arguments had begun is given out."""
        if self._state == "call":
            if cut and self._known and self._reader.arguments is not None:
                self._give_out()
            if self._sent is None:
                self._say(self._raw)
            else:
                self.num_calls += 1
        elif self._state == "open":
            self._say(self._raw + self._pending)
        elif self._state in ("start", "text"):
            self._say(self._pending)
        elif self._state == "broken":
            self._emit(CallArguments(self.num_calls - 1, self._pending))
        self._pending, self._raw, self._state = "", "", "text"
        return self._take()

    # ---------------------------------------------------------------------------- states: True if there is more to read

    def _start(self) -> bool:
        """A bare call, a marker, or text."""
        text, marker = self._pending.lstrip(_BLANK), self._dialect.marker
        if text.startswith("{"):
            self._raw, self._pending = self._pending[: -len(text)], text
            self._begin_call()
            return True
        if not text or (marker.startswith(text) and text != marker):
            return False
        self._state = "text"
        return True

    def _text(self) -> bool:
        """Content up to the marker; what may be the beginning of one, and the blanks before it, waits."""
        before, marker, after = self._pending.partition(self._dialect.marker)
        if marker:
            content = before.rstrip(_BLANK)
            self._say(content)
            self._raw, self._pending, self._state = before[len(content) :] + marker, after, "open"
            self._in_list = not self._dialect.opening
            return True
        sure = self._pending[: len(self._pending) - self._half(self._dialect.marker)].rstrip(_BLANK)
        self._say(sure)
        self._pending = self._pending[len(sure) :]
        return False

    def _half(self, word: str) -> int:
        """How many characters at the end of what is pending may be the beginning of `word`."""
        return next((n for n in range(len(word) - 1, 0, -1) if self._pending.endswith(word[:n])), 0)

    def _open(self) -> bool:
        """Behind the marker, or a separator: the opening of a list, then an object."""
        text = self._pending.lstrip(_BLANK)
        self._raw += self._pending[: len(self._pending) - len(text)]
        self._pending = text
        if not text:
            return False
        if not self._in_list and text[0] == self._dialect.opening:
            self._in_list = True
            self._raw, self._pending = self._raw + text[0], text[1:]
        elif self._in_list and text[0] == "{":
            self._begin_call()
        else:
            self._no_call()
        return bool(self._pending)

    def _begin_call(self) -> None:
        self._state, self._sent = "call", None
        self._reader = CallReader(self._dialect.argument_keys)

    def _call(self) -> bool:
        text = self._pending
        try:
            used = self._reader.push(text)
            if self._reader.name is not None and self._reader.name not in self._names:
                raise Malformed("no function of that name")
        except Malformed:
            self._broke(text)
            return bool(self._pending)
        self._raw, self._pending = self._raw + text[:used], text[used:]
        if self._reader.done or (self._eager and self._known and self._reader.arguments is not None):
            self._give_out()
        if self._reader.done:
            self.num_calls += 1
            self._state, self._raw = "after", ""
        return bool(self._pending)

    def _after(self) -> bool:
        """Behind a call's object: its ending, a separator and the next, or the closing; else text."""
        dialect, text = self._dialect, self._pending.lstrip(_BLANK)
        if not text:
            return False
        if dialect.ending and dialect.ending.startswith(text[: len(dialect.ending)]):
            if len(text) < len(dialect.ending):
                return False
            self._pending, self._state = text[len(dialect.ending) :], "text"
        elif dialect.closing and text[0] == dialect.closing:
            self._pending, self._state = text[1:], "text"
        elif dialect.separator and text[0] == dialect.separator:
            self._raw, self._pending, self._state, self._in_list = text[0], text[1:], "open", True
        elif dialect.bare and text[0] == "{":
            self._raw, self._pending = "", text
            self._begin_call()
        else:
            self._state = "text"
        return bool(self._pending)

    def _broken(self) -> bool:
        """A call that was given out and went wrong: what follows, up to its ending, still belongs to it."""
        ending, index = self._dialect.ending, self.num_calls - 1
        before, found, after = self._pending.partition(ending) if ending else (self._pending, "", "")
        if found:
            self._state = "text"
        elif half := self._half(ending):
            before, after = before[:-half], before[-half:]
        self._emit(CallArguments(index, before))
        self._pending = after
        return bool(found and after)

    # ---------------------------------------------------------------------------------------------------------- events

    @property
    def _known(self) -> bool:
        return self._reader.name in self._names

    def _give_out(self) -> None:
        """The call, as far as it is read and not given out yet."""
        call, index = self._reader, self.num_calls
        start, end = (0, 0) if call.arguments is None else (call.arguments[0], call.arguments[1] or len(call.text))
        if self._sent is None:
            self._emit(CallStart(index, self._dialect.new_id(), call.name or ""))
            self._sent = start
            if call.arguments is None:
                self._emit(CallArguments(index, "{}"))
        if end > self._sent:
            self._emit(CallArguments(index, call.text[self._sent : end]))
            self._sent = end

    def _broke(self, text: str) -> None:
        """The mistake is in `text`, which is undecided again."""
        if self._sent is None:
            self._no_call()
            return
        self.num_calls += 1
        assert self._reader.arguments is not None
        self._state = "broken" if self._reader.arguments[1] is None else "text"

    def _no_call(self) -> None:
        """What looked like a call is content; the text behind it may hold another."""
        self._say(self._raw)
        self._raw, self._state = "", "text"

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _emit(self, event: CallStart | CallArguments) -> None:
        empty = isinstance(event, CallArguments) and not event.text
        if not empty and (self._parallel or event.index == 0):
            self._events.append(event)

    def _take(self) -> list[ToolEvent]:
        taken, self._events = self._events, []
        return taken
