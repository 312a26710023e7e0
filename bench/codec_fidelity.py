"""What a codec does to a model's answers: SmolLM2 continues a real text from keys and values that went through it.

The text (mill_race.txt) is read in float32 up to `prefix` tokens; its pages are encoded and decoded, and the tokens
after it are read once more, teacher-forced, from the decoded pages. Compared are the distributions of the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tailrace.kernels.paged_attention import PagedPool, RowSpan, plan_attention
from tailrace.kv_cache.layout import PageLayout
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.source import ModelSource, open_source
from tailrace.model.weights import load_weights
from tailrace.transfer.codecs import PageCodec

TEXT = Path(__file__).with_name("mill_race.txt")
TOKENS_PER_PAGE = 16
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Fidelity:
    """kl: mean KL(with decoded KV || with float32 KV); agreement: share of positions with the same best token.

    ratio: bytes of the prefix's full pages in bfloat16 over their bytes on the wire; bit_equal: as decoded.
    """

    kl: float
    agreement: float
    ratio: float
    bit_equal: bool


class Reader:
    """SmolLM2 in float32 with the text's prefix in its pages.

    Args:
        prefix: tokens read beforehand; a multiple of TOKENS_PER_PAGE.
        tail: tokens after them that are judged.
    """

    def __init__(self, prefix: int, tail: int, source: ModelSource | None = None) -> None:
        source = source or open_source("smollm2")
        ids = source.tokenizer.encode(TEXT.read_text(), special=False)
        if prefix % TOKENS_PER_PAGE or len(ids) < prefix + tail:
            raise ValueError(f"{prefix} + {tail} tokens of {len(ids)}, pages of {TOKENS_PER_PAGE}")
        self.prefix, self.ids = prefix, ids[: prefix + tail]
        self._decoder = Decoder(load_weights(source, dtype=torch.float32))
        layout = PageLayout(state_groups(source.config)[0], TOKENS_PER_PAGE, "float32")
        num_pages = layout.num_pages(len(self.ids))
        self._pages = np.arange(1, num_pages + 1, dtype=np.int32)
        self._pool = torch.zeros(num_pages + 1, *layout.shape)
        for start in range(0, prefix, _CHUNK):
            self._forward(start, min(prefix, start + _CHUNK), judged=False)
        self.full = slice(1, 1 + prefix // TOKENS_PER_PAGE)
        self.kv = self._pool[self.full].clone()
        self._exact = self._tail()

    def through(self, codec: PageCodec, dtype: torch.dtype = torch.float32) -> Fidelity:
        """Judge a codec that is given the prefix's pages in `dtype`."""
        pages = self.kv.to(dtype)
        decoded = torch.empty_like(pages)
        rows, _ = encoded(codec, pages)
        codec.decode(rows, decoded)
        narrow = self.kv.to(torch.bfloat16)
        wire = int(encoded(codec, narrow)[1].sum())
        return self.judged(
            lambda: self._pool[self.full].copy_(decoded),
            narrow.numel() * 2 / wire,
            torch.equal(pages.view(torch.uint8), decoded.view(torch.uint8)),
        )

    def judged(self, put: Callable[[], object], ratio: float, bit_equal: bool) -> Fidelity:
        """The tail read from pages that `put` has changed, against the tail read from the right ones."""
        put()
        found = self._tail()
        self._pool[self.full].copy_(self.kv)
        kl = (found.exp() * (found - self._exact)).sum(-1).mean()
        agreement = (found.argmax(-1) == self._exact.argmax(-1)).float().mean()
        return Fidelity(float(kl), float(agreement), ratio, bit_equal)

    def _tail(self) -> torch.Tensor:
        """Log-probabilities [tail, vocab]."""
        return self._forward(self.prefix, len(self.ids), judged=True).log_softmax(-1)

    @torch.inference_mode()
    def _forward(self, start: int, end: int, *, judged: bool) -> torch.Tensor:
        pool = PagedPool(self._pool)
        rows = [RowSpan(start, end - start, self._pages)]
        pool.clear_fresh(rows)
        plan = plan_attention(pool, rows, self._decoder.windows)
        hidden = self._decoder.forward(torch.tensor(self.ids[start:end]), torch.arange(start, end), pool, plan)
        return self._decoder.logits(hidden) if judged else hidden


def encoded(codec: PageCodec, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(wire rows [n, bound] uint8, their lengths [n]) of pages."""
    rows = torch.empty((len(pages), codec.encoded_bytes(pages.shape[1:], pages.dtype)), dtype=torch.uint8)
    return rows, codec.encode(pages, rows)
