"""Prompts that begin as earlier ones did are not tokenized again: the prompt-token cache.

    text -> parts (text_cuts.py) -> each part's ids from memory, from the node's store, or from the tokenizer -> joined
    short text -> word_ids.py

The ids are exactly those of plain tokenization. A chat's next turn repeats its former messages, so all parts but the
last few are found; a short text is looked up word by word. Parts are keyed by a hash of the tokenizer and their text;
memory and store are bounded in bytes, least recently used first. Used by several threads at once; dies with its
process, the store outlives it.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from tailrace.router.text_cuts import PART_CHARS, Cuts
from tailrace.router.token_store import TokenStore
from tailrace.router.word_ids import WordIds
from tailrace.transfer.metrics import Metrics

KEY_BYTES = 16
_ENTRY_BYTES = 200  # of a part in memory, beside its ids
_CODE = "i"
BATCH_CHARS = 32_768  # tokenized at once: what is then made into ids, and freed, holds the interpreter a millisecond


class BatchEncoder(Protocol):
    """The tokenizer (model/tokenizer.py) as this module uses it."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclass(slots=True)
class CacheCounts:
    """Characters that were looked up, and those of them that needed no tokenizing; the same in tokens, by where they
    were found; prompts of which at least one part was found (`hits`) or none (`misses`); parts that had to go."""

    chars: int = 0
    hit_chars: int = 0
    memory_tokens: int = 0
    store_tokens: int = 0
    fresh_tokens: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class PromptTokenCache:
    """See the module.

    Args:
        encoder: tokenizes what is not known.
        cuts: from `exact_cuts` of this encoder.
        revision: hash of all that decides ids, so that two models share no entry.
        max_bytes: of memory.
        store: shared with the node's other ingress processes, or None.
    """

    def __init__(
        self, encoder: BatchEncoder, cuts: Cuts, *, revision: str, max_bytes: int, store: TokenStore | None = None
    ) -> None:
        self._encoder, self._cuts, self._store = encoder, cuts, store
        self._salt = blake2b(revision.encode(), digest_size=KEY_BYTES).digest()
        self._max_bytes, self._bytes = max_bytes, 0
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._words = WordIds(encoder, cuts)
        self._before, self._after = self._outer_ids()
        self.counts = CacheCounts()

    def encode(self, text: str, *, special: bool) -> Sequence[int]:
        """As Tokenizer.encode, a long text's ids as an array. Raises what it raises."""
        if len(text) < 2 * PART_CHARS:
            ids = self._words.encode(text)
            return [*self._before, *ids, *self._after] if special else ids
        parts = list(self._cuts.parts(text))
        keys = [
            blake2b(part.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES, key=self._salt).digest()
            for part in parts
        ]
        found = self._in_memory(keys)
        stored = self._in_store([key for key in keys if key not in found])
        found |= stored
        fresh = {key: part for key, part in zip(keys, parts, strict=True) if key not in found}
        new = self._encoded(fresh)
        self._keep(stored | new)
        if self._store is not None and (new or stored):
            self._store.add({key: ids.tobytes() for key, ids in new.items()}, list(stored))
        joined = array(_CODE)
        for key in keys:
            joined += new[key] if key in new else found[key]
        self._count(text, fresh, len(joined), sum(map(len, stored.values())), sum(map(len, new.values())))
        return array(_CODE, self._before) + joined + array(_CODE, self._after) if special else joined

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def num_bytes(self) -> int:
        """Bytes of memory that entries take."""
        return self._bytes

    def measure(self, metrics: Metrics) -> None:
        """Bring this process's metrics up to date."""
        counts, store = self.counts, self._store
        for source in ("memory", "store", "fresh"):
            metrics.raise_to("tailrace_prompt_cache_tokens_total", getattr(counts, f"{source}_tokens"), source=source)
        metrics.raise_to("tailrace_prompt_cache_prompts_total", counts.hits, result="hit")
        metrics.raise_to("tailrace_prompt_cache_prompts_total", counts.misses, result="miss")
        metrics.raise_to("tailrace_prompt_cache_evictions_total", counts.evictions, tier="memory")
        metrics.add("tailrace_prompt_cache_bytes", self._bytes, tier="memory")
        if store is not None:
            metrics.raise_to("tailrace_prompt_cache_evictions_total", store.evictions, tier="store")
            metrics.add("tailrace_prompt_cache_bytes", store.bytes, tier="store")

    # ----------------------------------------------------------------------------------------------------------- parts

    def _outer_ids(self) -> tuple[list[int], list[int]]:
        """What `special` puts before and after a text."""
        plain = self._encoder.encode("a", special=False)
        outer = self._encoder.encode("a", special=True)
        for at in range(len(outer) - len(plain) + 1):
            if outer[at : at + len(plain)] == plain:
                return outer[:at], outer[at + len(plain) :]
        return [], []

    def _encoded(self, fresh: dict[bytes, str]) -> dict[bytes, array[int]]:
        made: dict[bytes, array[int]] = {}
        batch: list[bytes] = []
        size = 0
        for number, (key, part) in enumerate(fresh.items(), 1):
            batch.append(key)
            size += len(part)
            if size >= BATCH_CHARS or number == len(fresh):
                for one, ids in zip(batch, self._encoder.encode_parts([fresh[k] for k in batch]), strict=True):
                    made[one] = array(_CODE, ids)
                batch, size = [], 0
        return made

    def _in_memory(self, keys: Sequence[bytes]) -> dict[bytes, array[int]]:
        found = {}
        with self._lock:
            for key in keys:
                ids = self._known.get(key)
                if ids is not None:
                    self._known.move_to_end(key)
                    found[key] = ids
        return found

    def _in_store(self, keys: Sequence[bytes]) -> dict[bytes, array[int]]:
        if self._store is None or not keys:
            return {}
        found = {}
        for key, data in self._store.find(keys).items():
            ids = array(_CODE)
            ids.frombytes(data)
            found[key] = ids
        return found

    def _keep(self, entries: dict[bytes, array[int]]) -> None:
        """An entry that is there already is not counted twice, and what goes takes off what it was."""
        with self._lock:
            for key, ids in entries.items():
                if key not in self._known:
                    self._known[key] = ids
                    self._bytes += _size(ids)
            while self._bytes > self._max_bytes and self._known:
                self._bytes -= _size(self._known.popitem(last=False)[1])
                self.counts.evictions += 1

    def _count(self, text: str, fresh: dict[bytes, str], num_tokens: int, stored: int, new: int) -> None:
        hit_chars = len(text) - sum(map(len, fresh.values()))
        with self._lock:
            counts = self.counts
            counts.chars += len(text)
            counts.hit_chars += hit_chars
            counts.store_tokens += stored
            counts.fresh_tokens += new
            counts.memory_tokens += max(0, num_tokens - stored - new)
            counts.hits += hit_chars > 0
            counts.misses += hit_chars <= 0


def _size(ids: array[int]) -> int:
    return _ENTRY_BYTES + len(ids) * ids.itemsize
