"""Where a text may be cut so that its parts, tokenized alone, give exactly the ids of the whole.

Two kinds of place are looked at: before the space of `ab cd`, and after the line feed of `ab\\ncd`. Tokenizers of the
byte level split there before they merge, and have no token that reaches over. `exact_cuts` finds out whether this one
does: it looks at every token's bytes, and tokenizes many texts whole and cut. A tokenizer that puts something in front
of whatever it is given (SentencePiece's dummy space) fails that, and its texts are not cut.

A place depends only on what stands beside it and on where the last cut was, so texts with the same beginning are cut
at the same places. Pure; knows nothing of caches.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

PART_CHARS = 1024  # a part is at least so long
_RANDOM_TEXTS = 400


class Tokens(Protocol):
    """What this module needs of a tokenizer (model/tokenizer.py)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_bytes(self, token: int) -> bytes: ...

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class _Rule:
    """`cut` matches the empty string at a place; `crossing` matches bytes of a token that would reach over one."""

    cut: str
    crossing: re.Pattern[bytes]


_RULES = (
    _Rule(r"(?= [A-Za-z])(?<=[A-Za-z])", re.compile(rb"[A-Za-z] ")),  # the space first: most characters are none
    _Rule(r"(?<=\w\n)(?=\w)", re.compile(rb"\n[\w\x80-\xff]")),
)

_PIECES = (
    "a", "Zoo", "é", "ß", "你", "好", "한", "😀", "e\u0301", "7", "42", "1234", " ", "  ", "\n", "\n\n", "\r\n", "\t",
    "\u00a0",    "'s", "'LL", "n't", ".", ",", "!", "/", "//", "_", "-", "(", "](", "#", "=>", "the",
    " the", " of", "I", "x y", "b\nc",
)  # fmt: skip


class Cuts:
    """The places of one tokenizer.

    Args:
        patterns: each matches the empty string at places of one kind. Words are cut at those of the first alone, which
            is found three times as fast as either of two.
    """

    def __init__(self, *patterns: str) -> None:
        self._place = re.compile("|".join(patterns))
        self._word = re.compile(patterns[0])

    def parts(self, text: str, least: int = PART_CHARS) -> Iterator[str]:
        """The text in order, in parts of at least `least` (1 or more) characters, but for the last."""
        start = 0
        while (place := self._place.search(text, start + least)) is not None:
            yield text[start : place.start()]
            start = place.start()
        yield text[start:]

    def words(self, text: str) -> list[str]:
        """The text in order, in parts as short as places of the first kind allow."""
        return self._word.split(text)

    def places(self, text: str) -> list[int]:
        return [place.start() for place in self._place.finditer(text)]


def exact_cuts(tokens: Tokens, added: Sequence[str] = ()) -> Cuts | None:
    """The cuts that change no id, or None if this tokenizer has none.

    Args:
        added: tokens that are found in a text before it is split; those that a cut might touch are tried.
    """
    kept = [rule for rule in _RULES if not _crossed(tokens, rule) and _changes_nothing(tokens, Cuts(rule.cut), added)]
    return Cuts(*(rule.cut for rule in kept)) if kept else None


def _crossed(tokens: Tokens, rule: _Rule) -> bool:
    special = tokens.special_ids
    return any(
        token not in special and rule.crossing.search(tokens.id_to_bytes(token)) for token in range(tokens.vocab_size)
    )


def _changes_nothing(tokens: Tokens, cuts: Cuts, added: Sequence[str]) -> bool:
    texts, sides = [], []
    for text in _texts(added):
        for place in cuts.places(text):
            texts.append(text)
            sides += [text[:place], text[place:]]
    ids = tokens.encode_parts(sides)
    cut = [left + right for left, right in zip(ids[::2], ids[1::2], strict=True)]
    return cut == tokens.encode_parts(texts)


def _texts(added: Sequence[str]) -> Iterator[str]:
    """Every pair of pieces around both places, random mixtures, and added tokens that begin, end or hold a place."""
    for left in _PIECES:
        for right in _PIECES:
            yield f"{left}ab cd{right}"
            yield f"{left}b\nc{right}"
    rng = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        yield "".join(rng.choice(_PIECES) for _ in range(rng.randrange(2, 24)))
    for token in added:
        if re.match(r"\w|.*\w$|.*\w\s\w", token, re.DOTALL):
            yield f"ab {token} cd"
            yield f"ab\n{token}\ncd"
            yield f"ab{token}cd {token} {token}\n{token}"
