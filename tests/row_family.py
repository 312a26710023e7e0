"""A small family whose logits depend on every kind of row: what is lost, stale or another's changes tokens at once.

    layer 0   WINDOW(8) and HISTORY(1/2): a row a pair of tokens; the open token waits in a TAIL
    layer 1   WINDOW(8) and HISTORY(1/4): a row for four tokens and the four before them, kept as CARRY; TAIL
    ids       the last three enter each embedding: TOKENS(3)

It goes through the same door as the real ones (model/family.py): `write_row_checkpoint` makes a directory that
`open_source` opens once `register()` has been called.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from checkpoints import BOS, CHAT_TEMPLATE, EOS, EOS_ID, VOCAB_SIZE, tiny_tokenizer_json
from safetensors.torch import save_file

from tailrace.model import family
from tailrace.model.row_groups import RowField, RowGroup, RowPages
from tailrace.model.state_groups import GroupKind

NAME = "tiny_rows"
DIM, WINDOW, LOOKBACK = 16, 8, 3
RATIOS = (2, 4)
HEADS = 2
PARTS = ("window", "history2", "history4", "carry", "tail2", "tail4", "ids")  # of fields, for ablations


@dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 32
    num_layers: int = 2
    max_position: int = 4096
    num_parameters: int = 1000
    family: str = NAME

    def row_groups(self, kv_dtype: str) -> tuple[RowGroup, ...]:
        row = 4 * DIM
        return (
            RowGroup(GroupKind.HISTORY, (0,), (RowField("history2", row, "f32"),), tokens_per_row=2),
            RowGroup(GroupKind.HISTORY, (1,), (RowField("history4", row, "f32"),), tokens_per_row=4),
            RowGroup(GroupKind.WINDOW, (0, 1), (RowField("window", row, "f32"),), rows=WINDOW),
            RowGroup(GroupKind.CARRY, (1,), (RowField("carry", row, "f32"),), rows=4),
            RowGroup(GroupKind.TAIL, (0,), (RowField("tail2", 2 * row, "f32"),), rows=1, period=2),
            RowGroup(GroupKind.TAIL, (1,), (RowField("tail4", 2 * row, "f32"),), rows=3, period=4),
            RowGroup(GroupKind.TOKENS, (0,), (RowField("ids", 4, "i32"),), rows=LOOKBACK),
        )


def parse_config(raw, where):
    return Config(max_position=int(raw["max_position_embeddings"]))


def load(tensors, config, dtype, tokens_per_page, progress=None):
    assert dtype is torch.float32
    read = {
        name: torch.from_numpy(np.frombuffer(entry.data, np.float32).reshape(entry.shape).copy())
        for name, entry in tensors.items()
    }
    if progress is not None:
        progress(tensors.num_bytes, tensors.num_bytes)
    return Decoder(read, config, tokens_per_page)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def _floats(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.float32)


class Decoder:
    def __init__(self, weights, config, tokens_per_page) -> None:
        self.w, self.config, self.dtype = weights, config, torch.float32
        self.layout = RowPages(config.row_groups("float32"), tokens_per_page)

    def forward(self, ids, positions, pool, rows, num_layers=None):
        hidden = torch.zeros(len(ids), self.config.hidden_size)
        at = 0
        for row in rows:
            new = slice(at, at + row.num_new)
            hidden[new] = self._sequence(ids[new], row.start, pool.of(row.pages))
            at = new.stop
        return hidden

    def logits(self, hidden):
        return hidden @ self.w["head"].T

    def _sequence(self, ids, start, rows):
        x = self._embed(ids, start, rows.state("ids", 0))
        for layer, ratio in enumerate(RATIOS):
            x = x + self._attend(layer, ratio, torch.nn.functional.rms_norm(x, x.shape[-1:]), start, rows)
            inner = torch.nn.functional.rms_norm(x, x.shape[-1:]) @ self.w[f"up{layer}"].T
            x = x + torch.tanh(inner) @ self.w[f"down{layer}"].T
        return torch.nn.functional.rms_norm(x, x.shape[-1:])

    def _embed(self, ids, start, state):
        before = torch.arange(max(0, start - LOOKBACK), start)
        old = state.read(before % LOOKBACK).contiguous().view(torch.int32).reshape(-1).long()
        known = torch.cat((old, ids))
        x = self.w["embed"][ids].clone()
        for back in range(1, LOOKBACK + 1):
            seen = torch.arange(len(ids)) + len(old) - back
            there = seen >= 0
            x[there] += self.w[f"back{back}"][known[seen[there]]]
        last = torch.arange(max(0, len(known) - LOOKBACK), len(known))
        where = (last + start - len(old)) % LOOKBACK
        state.write(where, known[last].to(torch.int32).contiguous().view(torch.uint8).reshape(-1, 4))
        return x

    def _attend(self, layer, ratio, x, start, rows):
        n = len(x)
        window = rows.state("window", layer)
        before = torch.arange(max(0, start - WINDOW + 1), start)
        recent = torch.cat((_floats(window.read(before % WINDOW)), x @ self.w[f"kv{layer}"].T))
        at = torch.arange(n) + start
        where = torch.cat((before, at))
        history = self._history(layer, ratio, x, start, rows)
        keys = torch.cat((history, recent))
        q = (x @ self.w[f"q{layer}"].T).unflatten(-1, (HEADS, DIM)).transpose(0, 1)
        age = at[:, None] - where[None]
        seen = torch.cat(
            (torch.arange(len(history))[None] < (at[:, None] + 1) // ratio, (age >= 0) & (age < WINDOW)), dim=1
        )
        scores = (q @ keys.T).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ keys).transpose(0, 1).flatten(1) @ self.w[f"o{layer}"].T
        last = torch.arange(max(0, len(where) - WINDOW), len(where))
        window.write(where[last] % WINDOW, _bytes(recent[last]))
        return out

    def _history(self, layer, ratio, x, start, rows):
        """All rows that the chunk's last token sees; new ones are written, and what stays open."""
        store, tail = rows.history(f"history{ratio}", layer), rows.state(f"tail{ratio}", layer)
        open_before = start % ratio
        parts = x @ self.w[f"pool{layer}"].T  # [n, a | b]
        parts = torch.cat((_floats(tail.read(torch.arange(open_before))), parts))
        closed = len(parts) // ratio
        a, b = parts[: closed * ratio].unflatten(0, (closed, ratio)).split(DIM, -1)
        new = b.mean(1)
        if ratio == 4:
            carry = rows.state("carry", layer)
            first = start // ratio
            old = _floats(carry.read(torch.arange(4)))[None] if first else torch.zeros(1, 4, DIM)
            new = new + torch.cat((old, a))[:closed].tanh().mean(1)
            if closed:
                carry.write(torch.arange(4), _bytes(a[-1]))
        else:
            new = new + a.tanh().mean(1)
        known = store.first(start // ratio)
        if closed:
            store.write(start // ratio, _bytes(new))
        left = len(parts) - closed * ratio
        if left:
            tail.write(torch.arange(left), _bytes(parts[closed * ratio :]))
        return torch.cat((_floats(known), new))


def weights(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    d = Config.hidden_size
    made = {"embed": normal(VOCAB_SIZE, d, std=1.0), "head": normal(VOCAB_SIZE, d, std=4.0 / d**0.5)}
    made |= {f"back{back}": normal(VOCAB_SIZE, d, std=0.7) for back in range(1, LOOKBACK + 1)}
    for layer in range(len(RATIOS)):
        made[f"kv{layer}"] = normal(DIM, d, std=1.2 / d**0.5)
        made[f"pool{layer}"] = normal(2 * DIM, d, std=2.0 / d**0.5)
        made[f"q{layer}"] = normal(HEADS * DIM, d, std=1.0 / d**0.5)
        made[f"o{layer}"] = normal(d, HEADS * DIM, std=2.0 / (HEADS * DIM) ** 0.5)
        made[f"up{layer}"] = normal(2 * d, d, std=1.5 / d**0.5)
        made[f"down{layer}"] = normal(d, 2 * d, std=1.5 / (2 * d) ** 0.5)
    return made


def register() -> None:
    """Make the family known to this process."""
    family.FAMILIES[NAME] = family.Family("row_family", "row_family")


def write_row_checkpoint(directory: Path, seed: int = 3, max_position: int = 4096) -> Path:
    """A directory that `open_source` opens; registers the family."""
    register()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps({"model_type": NAME, "vocab_size": VOCAB_SIZE, "max_position_embeddings": max_position})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    save_file(weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
