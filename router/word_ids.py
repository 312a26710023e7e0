"""Ids of the words of short texts, each tokenized once: most words of a text stand in many others.

    text -> words (text_cuts.py) -> ids of each from memory, or from the tokenizer -> joined

The ids are exactly those of plain tokenization. To look a word up costs a fifth of tokenizing it. Bounded in words;
used by several threads at once; dies with its process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from tailrace.router.text_cuts import Cuts

MAX_WORDS = 32_768  # then all are forgotten, and the usual ones are soon known again
MAX_WORD_CHARS = 64  # of one that is remembered; what a template puts around a message stands with words
MAX_NEW_WORDS = 12  # learnt from one text: alone a word costs several times what it costs among others


class WordEncoder(Protocol):
    """The tokenizer (model/tokenizer.py) as this module uses it."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]: ...


class WordIds:
    """See the module.

    Args:
        encoder: tokenizes what is not known.
        cuts: from `exact_cuts` of this encoder.
    """

    def __init__(self, encoder: WordEncoder, cuts: Cuts) -> None:
        self._encoder, self._cuts = encoder, cuts
        self._known: dict[str, Sequence[int]] = {}

    def __len__(self) -> int:
        """Words that are known."""
        return len(self._known)

    def encode(self, text: str) -> list[int]:
        """As Tokenizer.encode, nothing put around the text. Raises what it raises."""
        words = self._cuts.words(text)
        found = list(map(self._known.get, words))
        known = [ids for ids in found if ids is not None]
        if len(known) == len(words):
            return list(chain.from_iterable(known))
        new = list(dict.fromkeys(word for word, ids in zip(words, found, strict=True) if ids is None))
        learnt = self._learn(new[:MAX_NEW_WORDS])
        if len(new) > MAX_NEW_WORDS:
            return self._encoder.encode(text, special=False)
        every = [learnt[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
        return list(chain.from_iterable(every))

    def _learn(self, words: Sequence[str]) -> dict[str, list[int]]:
        """Ids of each; all but the long ones are known from now on."""
        learnt = dict(zip(words, self._encoder.encode_parts(words), strict=True))
        if len(self._known) >= MAX_WORDS:
            self._known.clear()
        self._known.update({word: tuple(ids) for word, ids in learnt.items() if len(word) <= MAX_WORD_CHARS})
        return learnt
