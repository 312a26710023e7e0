"""The prompt-token cache beside plain tokenization: the same tokenizer, texts and process. Times in ms.

    prompt_cache.next_turn    ids of a chat of at least 32,000 tokens with one more turn, whose former turns are known;
                              against tokenize (target: at most 0.1)
      .fresh                  the same length, never seen: what looking up costs; against tokenize
      .stored                 as the first, in another process of the node, which finds them in the shared store
    prompt_cache.start        finding out once, at the start, where this tokenizer's texts may be cut

Every answer is compared with the plain ids; a row is held where one differs.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import MIN_PAIRS, Row, arguments, finish, identity, interleaved, row_of

from tailrace.model.source import open_source
from tailrace.model.tokenizer import Tokenizer
from tailrace.router.text_cuts import Cuts, exact_cuts
from tailrace.router.token_cache import PromptTokenCache
from tailrace.router.token_store import TokenStore

NAMES = ("prompt_cache.next_turn", "prompt_cache.start")
TOKENS = 32_000
TURN_WORDS = 120
TEXT = Path(__file__).resolve().parent / "mill_race.txt"
STORE_BYTES = MEMORY_BYTES = 64 << 20


class Chats:
    """Chats of ordinary words, no two alike, each turn new."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = TEXT.read_text().split()
        self._numbers = itertools.count()

    def turn(self) -> str:
        rng = random.Random(next(self._numbers))
        asked, answered = (" ".join(rng.choices(self._words, k=TURN_WORDS)) for _ in range(2))
        return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answered}<|im_end|>\n"

    def long(self) -> str:
        """One of at least TOKENS tokens."""
        chat = self.turn()
        per_turn = len(self._tokenizer.encode(chat, special=False))
        return chat + "".join(self.turn() for _ in range(TOKENS // per_turn + 2))


class Measure:
    """The encoders of one tokenizer, and whether all of them said the same."""

    def __init__(self, tokenizer: Tokenizer, cuts: Cuts, store: Path) -> None:
        self.tokenizer, self.cuts, self.chats = tokenizer, cuts, Chats(tokenizer)
        self.equal, self.tokens = True, 0
        self.cache = self._cache(TokenStore(store, STORE_BYTES))
        self._store = store

    def _cache(self, store: TokenStore | None = None) -> PromptTokenCache:
        return PromptTokenCache(self.tokenizer, self.cuts, revision="bench", max_bytes=MEMORY_BYTES, store=store)

    def next_turn(self, pairs: int) -> list[Row]:
        chat = self.chats.long()
        self.tokens = len(self.cache.encode(chat, special=False))
        known: list[str] = []

        def ours() -> float:
            known.append((known[-1] if known else chat) + self.chats.turn())
            return self._timed(self.cache, known[-1])

        def plain() -> float:
            return self._timed(None, known[-1] if known else chat)

        rows = [self._row("prompt_cache.next_turn", {"ours": ours, "tokenize": plain}, pairs)]
        rows.append(self._row("prompt_cache.next_turn.fresh", self._fresh(), pairs))

        def stored() -> float:
            known.append(known[-1] + self.chats.turn())
            self.cache.encode(known[-1], special=False)
            other = self._cache(TokenStore(self._store, STORE_BYTES))
            took = self._timed(other, known[-1])
            other.close()
            return took

        return [*rows, self._row("prompt_cache.next_turn.stored", {"ours": stored, "tokenize": plain}, pairs)]

    def start(self, pairs: int) -> list[Row]:
        def ours() -> float:
            started = time.perf_counter()
            exact_cuts(self.tokenizer, self.tokenizer.added_tokens())
            return 1e3 * (time.perf_counter() - started)

        return [self._row("prompt_cache.start", {"ours": ours}, pairs)]

    def _fresh(self) -> dict[str, Callable[[], float]]:
        return {
            "ours": lambda: self._timed(self._cache(), self.chats.long()),
            "tokenize": lambda: self._timed(None, self.chats.long()),
        }

    def _timed(self, cache: PromptTokenCache | None, text: str) -> float:
        """Milliseconds to the ids, which are checked afterwards."""
        encode = self.tokenizer.encode if cache is None else cache.encode
        started = time.perf_counter()
        ids = encode(text, special=False)
        took = 1e3 * (time.perf_counter() - started)
        if cache is not None and list(ids) != self.tokenizer.encode(text, special=False):
            self.equal = False
        return took

    def _row(self, name: str, measures: dict[str, Callable[[], float]], pairs: int) -> Row:
        row = row_of(name, "ms", "lower", interleaved(measures, pairs), identity(tokens=self.tokens, path="in process"))
        if not self.equal:
            row.status, row.reason = "held", "some ids were not those of plain tokenization; when they are"
        return row


def rows(names: Sequence[str], pairs: int = MIN_PAIRS) -> list[Row]:
    """Those of NAMES that are wanted, with SmolLM2's tokenizer."""
    tokenizer = open_source("smollm2").tokenizer
    cuts = exact_cuts(tokenizer, tokenizer.added_tokens())
    assert cuts is not None
    with tempfile.TemporaryDirectory() as folder:
        measure = Measure(tokenizer, cuts, Path(folder) / "tokens")
        made = measure.next_turn(pairs) if NAMES[0] in names else []
        made += measure.start(pairs) if NAMES[1] in names else []
        measure.cache.close()
    return made


def main() -> None:
    args = arguments((__doc__ or "").splitlines()[0], NAMES)
    finish(rows(args.names, MIN_PAIRS if args.quick else 3 * MIN_PAIRS), args)


if __name__ == "__main__":
    main()
