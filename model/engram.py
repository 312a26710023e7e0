"""Engram: memory that is looked up by the last few tokens and written into the residual where it fits.

A token's id goes through a fixed map onto classes (" The", "the" and "THE" are one). The last n classes of a position,
for each n from 2 on, are hashed several times; every hash names a row of a table. Which rows a position needs is a pure
function of ids, so they can be fetched before the forward comes to them, and a table may be split over ranks by row
range (the ranks' results are added up). A gate a residual stream decides how much of the rows' value is added to it.

What decode needs of the past is the classes of the last max_ngram - 1 tokens. Source: DeepSeek V4.1's model card and
inference code; Cheng et al. 2026 ("Conditional Memory via Scalable Lookup"), whose convolution V4.1 left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers

from tailrace.kernels.steady import steady_linear, steady_sigmoid
from tailrace.model.csa2_config import EngramConfig
from tailrace.model.errors import ConfigError
from tailrace.model.hf_directory import TOKEN_MAP_FILE

NOTHING = -1  # class of what is not there: before the prompt's start, or a masked token
_GATE_FLOOR = 1e-6
_ROWS_AHEAD = 4096  # read at once, so that little memory is used
_REPLACEMENT = "\ufffd"


# ------------------------------------------------------------------------------------------------------- token classes


def read_token_map(directory: Path, config: EngramConfig) -> np.ndarray:
    """Class of every token id, [vocabulary] int64: from the checkpoint's own file, else derived from its tokenizer.

    Raises:
        ConfigError: neither file can be read, or the number of classes is not the config's (hashes depend on it).
    """
    path = directory / TOKEN_MAP_FILE
    if not path.exists():
        path = directory / "tokenizer.json"
        return checked_token_map(token_classes(_tokenizer(path)), config, str(path))
    try:
        classes = np.asarray(json.loads(path.read_text(encoding="utf-8")), np.int64)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return checked_token_map(classes, config, str(path))


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for every malformed file
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def checked_token_map(classes: np.ndarray, config: EngramConfig, where: str) -> np.ndarray:
    """`classes` if they are what the config says they are."""
    if classes.ndim != 1 or not classes.size or classes.min() < 0 or classes.max() + 1 != config.num_classes:
        found = classes.max() + 1 if classes.size else 0
        raise ConfigError(f"{where}: {found} token classes, engram_compressed_vocab_size is {config.num_classes}")
    if config.pad_id >= len(classes):
        raise ConfigError(f"{where}: engram_pad_token_id is {config.pad_id} of {len(classes)} ids")
    return classes


def token_classes(tokenizer: Tokenizer) -> np.ndarray:
    """Ids whose texts are equal but for case, accents, width and kind of blank share a class; numbered as met.

    A token that is no text of its own (part of a character) is a class of its own.
    """
    blank = "\ue000"  # stands for a token that is only blanks, which strip would lose
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), blank),
            normalizers.Strip(),
            normalizers.Replace(blank, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    classes = np.empty(tokenizer.get_vocab_size(), np.int64)
    for i in range(len(classes)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = tokenizer.id_to_token(i) if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        classes[i] = numbers.setdefault(key, len(numbers))
    return classes


# -------------------------------------------------------------------------------------------------------------- hashes


class EngramHash:
    """Which rows of which table a position reads.

    Args:
        token_map: [vocabulary] int64 class of each id.

    Raises:
        ConfigError: a table of the config has fewer rows than its hashes name.
    """

    def __init__(self, config: EngramConfig, token_map: np.ndarray) -> None:
        self.config = config
        self._classes = torch.from_numpy(token_map.astype(np.int64))
        self._pad = int(token_map[config.pad_id])
        primes = hash_primes(config)  # [layer, n-gram size, head]
        for layer, each, rows in zip(config.layers, primes, config.table_rows, strict=True):
            if each.sum() > rows:
                raise ConfigError(f"engram of layer {layer}: its hashes name {each.sum()} rows, the table has {rows}")
        flat = primes.reshape(len(primes), -1)
        self._primes = torch.from_numpy(primes)
        self._offsets = torch.from_numpy(flat.cumsum(1) - flat)
        self._multipliers = torch.from_numpy(hash_multipliers(config))

    def classes(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [n] int64 -> [n] int64, NOTHING for masked ones and for ids that no token has.

        A vocabulary may be padded beyond the tokenizer's: such an id can still be sampled.
        """
        known = len(self._classes)
        hidden = (ids == self.config.masked_id) | (ids >= known)
        return self._classes[ids.clamp(max=known - 1)].masked_fill(hidden, NOTHING)

    def rows(self, layer: int, classes: torch.Tensor) -> torch.Tensor:
        """Rows of a layer's table.

        Args:
            classes: [lookback + n] int64 of n consecutive positions and those before them, NOTHING where there is none.

        Returns:
            [n, (max_ngram - 1) * heads] int64, by n-gram size, then head.
        """
        which = self.config.layers.index(layer)
        back = torch.stack([classes.roll(k) for k in range(self.config.max_ngram)], 1)[self.config.lookback :]
        hidden = (back == NOTHING).cummax(1).values  # no n-gram reaches over what is not there
        products = back.masked_fill(hidden, self._pad) * self._multipliers[which]
        mixed, found = products[:, 0], []
        for k in range(1, self.config.max_ngram):
            mixed = mixed ^ products[:, k]
            found.append(mixed[:, None] % self._primes[which, k - 1])
        return torch.cat(found, 1) + self._offsets[which]

    def rows_of_ids(
        self, ids: Sequence[int], num_before: int, layers: Sequence[int] | None = None
    ) -> dict[int, torch.Tensor]:
        """All rows that a span of a prompt will read, by layer, sorted: what to fetch before its forward.

        Args:
            ids: of the span and, before them, those of the `num_before` positions in front of it; `lookback` of them
                are enough, fewer only where the prompt starts.
            layers: of which tables; all if None.
        """
        lookback = self.config.lookback
        classes = self.classes(torch.tensor(ids, dtype=torch.int64))[max(0, num_before - lookback) :]
        missing = classes.new_full((max(0, lookback - num_before),), NOTHING)
        found = self.config.layers if layers is None else layers
        return {layer: self.rows(layer, torch.cat((missing, classes))).unique() for layer in found}


def hash_primes(config: EngramConfig) -> np.ndarray:
    """[layer, n-gram size, head] int64: each the next prime from first_bucket on that is not taken yet.

    Sizes start over for every n-gram size, so no prime may be taken twice anywhere, and each hash has its own rows.
    """
    taken: set[int] = set()
    primes = np.empty((len(config.layers), config.lookback, config.heads), np.int64)
    for sizes in primes.reshape(-1, config.heads):
        candidate = config.first_bucket - 1
        for head in range(config.heads):
            candidate += 1
            while candidate in taken or not _is_prime(candidate):
                candidate += 1
            taken.add(candidate)
            sizes[head] = candidate
    return primes


def _is_prime(n: int) -> bool:
    if n < 4 or n % 2 == 0:
        return n in (2, 3)
    return bool((n % np.arange(3, int(n**0.5) + 2, 2)).all())


def hash_multipliers(config: EngramConfig) -> np.ndarray:
    """[layer, max_ngram] int64, odd, so small that no product with a class overflows; seeded by the layer's number."""
    bound = max(1, np.iinfo(np.int64).max // config.num_classes // 2)
    drawn = [
        np.random.default_rng(10007 * layer).integers(low=0, high=bound, size=config.max_ngram, dtype=np.int64)
        for layer in config.layers
    ]
    return np.stack(drawn) * 2 + 1


# -------------------------------------------------------------------------------------------------------------- tables


def row_range(num_rows: int, rank: int, num_ranks: int) -> range:
    """Rows of a table that a rank holds: consecutive, and as many as the others' or one more."""
    return range(num_rows * rank // num_ranks, num_rows * (rank + 1) // num_ranks)


class EngramTable:
    """Some rows of one layer's table, decoded when they are read: 98 GB a table are not copied.

    Args:
        gather: rows by number, [n] int64 -> [n, dim] float32; asked for `held` ones only.
        held: which rows of the table are here.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor], held: range) -> None:
        self._gather, self.held = gather, held

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows [n] those that are here: what this rank fetches ahead."""
        return rows[(rows >= self.held.start) & (rows < self.held.stop)]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, hashes] int64 -> [n, hashes * dim] float32, 0 for rows that other ranks hold."""
        flat = rows.flatten()
        is_held = (flat >= self.held.start) & (flat < self.held.stop)
        if is_held.all():
            return self._gather(flat).unflatten(0, rows.shape).flatten(1)
        own = self._gather(flat[is_held])
        return (
            own.new_zeros(len(flat), own.shape[1])
            .index_copy_(0, is_held.nonzero()[:, 0], own)
            .unflatten(0, rows.shape)
            .flatten(1)
        )


class RowsAhead:
    """Reads what a prompt will need before its steps come to it, on a thread of its own.

    A table is a mapped file, so a row that was read is in memory when it is read again: nothing else is kept. What is
    asked for twice is read twice; what fails here fails again, and is told, where it is needed.
    """

    def __init__(self, hashes: EngramHash, tables: Mapping[int, EngramTable]) -> None:
        self._hashes, self._tables = hashes, tables
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engram-ahead")

    def ask(self, ids: Sequence[int], num_before: int) -> Future[int]:
        """Fetch what `rows_of_ids` names, as far as this rank holds it -> the number of rows, once they are there."""
        return self._thread.submit(self._read, list(ids), num_before)

    def _read(self, ids: list[int], num_before: int) -> int:
        count = 0
        for layer, rows in self._hashes.rows_of_ids(ids, num_before, tuple(self._tables)).items():
            own = self._tables[layer].own(rows)
            for some in own.split(_ROWS_AHEAD):
                self._tables[layer].read(some[:, None])
            count += len(own)
        return count

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        self._thread.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------- gate


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Of one layer. `n` streams of `hidden`.

    Attributes:
        table: its rows, or a rank's share of them.
        wkv: [(n + 1) hidden, row width]: a key a stream, then the value they share.
        match: [n, hidden] float32: the query's weight times the key's.
    """

    table: EngramTable
    wkv: torch.Tensor
    match: torch.Tensor


def write_memory(
    streams: torch.Tensor, found: torch.Tensor, weights: EngramWeights, is_masked: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add to each stream the rows' value as far as their key matches it.

    Args:
        streams: [rows, n, hidden].
        found: [rows, row width] float32, from all ranks' tables.
        is_masked: [rows] bool; these stay as they are.

    Returns:
        [rows, n, hidden] in the streams' dtype.
    """
    n, hidden = streams.shape[1:]
    both = steady_linear(found.to(weights.wkv.dtype), weights.wkv).float()
    keys, value = both[:, : n * hidden].unflatten(1, (n, hidden)), both[:, n * hidden :]
    x = streams.float()
    rms = (x.square().mean(-1) + eps).rsqrt() * (keys.square().mean(-1) + eps).rsqrt()
    match = (x * weights.match * keys).sum(-1) * rms * hidden**-0.5
    size = match.abs().clamp(min=_GATE_FLOOR).sqrt()
    gate = steady_sigmoid(torch.where(match < 0, -size, size)).masked_fill(is_masked[:, None], 0)
    return (x + gate[..., None] * value[:, None]).to(streams.dtype)
