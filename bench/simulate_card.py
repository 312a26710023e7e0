"""Service times of a card, measured: what bench/simulate.py takes as the times of a worker.

A decoder of Llama 3 8B's shapes with random bfloat16 weights in plain torch, prefill as it is called, the decode step
as a captured graph. Least squares over shapes gives the five numbers of `simulate_times.ServiceTimes`; the largest
relative error of a fit is printed beside them. It knows no serving. Without a card it says so and ends.

    python bench/simulate_card.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
PREFILLS = [(n, past) for past in (0, 8192, 32768) for n in (256, 512, 1024, 2048, 4096, 8192)]
DECODES = [(batch, context) for batch in (1, 4, 16, 32, 64) for context in (2048, 8192, 16384)]


class Card:
    """The decoder on one card."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.layers = [
            (make(HIDDEN, width), make(HIDDEN, HIDDEN), make(HIDDEN, 2 * MLP), make(MLP, HIDDEN)) for _ in range(LAYERS)
        ]
        self.head = make(HIDDEN, VOCABULARY)

    def _layer(self, x: Any, weights: Any, keys: Any, values: Any, mask: Any) -> Any:
        """x [batch, new, HIDDEN]; keys, values [batch, KV_HEADS, past, HEAD_DIM]."""
        torch, functional = self.torch, self.torch.nn.functional
        qkv, out, up, down = weights
        batch, new, _ = x.shape
        projected = (functional.rms_norm(x, (HIDDEN,)) @ qkv).view(batch, new, HEADS + 2 * KV_HEADS, HEAD_DIM)
        query, key, value = projected.transpose(1, 2).split((HEADS, KV_HEADS, KV_HEADS), 1)
        if new == 1:  # the query heads of a group are rows that read the same keys
            grouped = query.reshape(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            mixed = functional.scaled_dot_product_attention(grouped, keys, values).reshape(batch, 1, HIDDEN)
        else:
            repeat = HEADS // KV_HEADS
            keys = torch.cat((keys, key), 2).repeat_interleave(repeat, 1)
            values = torch.cat((values, value), 2).repeat_interleave(repeat, 1)
            mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
            mixed = mixed.transpose(1, 2).reshape(batch, new, HIDDEN)
        x = x + mixed @ out
        gate, straight = (functional.rms_norm(x, (HIDDEN,)) @ up).chunk(2, -1)
        return x + (functional.silu(gate) * straight) @ down

    def step(self, batch: int, new: int, past: int) -> Callable[[], Any]:
        """A forward over `new` tokens of each of `batch` sequences that have `past` tokens already."""
        torch = self.torch
        x = torch.randn(batch, new, HIDDEN, device="cuda", dtype=torch.bfloat16)
        kv = torch.randn(2, batch, KV_HEADS, past, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        mask = None
        if new > 1 and past:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(new, past + new)

        def run() -> Any:
            y = x
            for weights in self.layers:
                y = self._layer(y, weights, kv[0], kv[1], mask)
            return (y[:, -1] @ self.head).argmax(-1)

        return run

    def seconds(self, run: Callable[[], Any], *, graph: bool, turns: int = 5) -> float:
        """Median of some turns."""
        torch = self.torch
        with torch.inference_mode():
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            if graph:
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    run()
                run = captured.replay
            found = []
            for _ in range(turns):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
        return sorted(found)[turns // 2]

    def copy_bytes_per_s(self) -> float:
        """Pinned host memory to the card, 1 GiB."""
        torch = self.torch
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        card = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        return (1 << 30) / self.seconds(lambda: card.copy_(host, non_blocking=True), graph=False)


def fit(rows: list[list[float]], seconds: list[float]) -> tuple[list[float], float]:
    """Coefficients of least relative squares, none below 0, and the largest relative error."""
    import numpy as np
    from scipy.optimize import nnls

    a, b = np.array(rows), np.array(seconds)
    found, _ = nnls(a / b[:, None], np.ones_like(b))
    return [float(v) for v in found], float(np.max(np.abs(a @ found / b - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no card here")
    card = Card()
    prefills = [card.seconds(card.step(1, n, past), graph=False) for n, past in PREFILLS]
    decodes = [card.seconds(card.step(batch, 1, past), graph=True) for batch, past in DECODES]
    prefill, prefill_error = fit([[1.0, n, n * (past + n / 2)] for n, past in PREFILLS], prefills)
    decode, decode_error = fit([[1.0, b, b * past] for b, past in DECODES], decodes)
    found = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "prefill": {"pass_s": prefill[0], "token_s": prefill[1], "pair_s": prefill[2], "error": prefill_error},
        "decode": {"step_s": decode[0], "row_s": decode[1], "context_token_s": decode[2], "error": decode_error},
        "host_copy_bytes_per_s": card.copy_bytes_per_s(),
        "bytes_per_token": BYTES_PER_TOKEN,
        "samples": {
            "prefill": [[*shape, s] for shape, s in zip(PREFILLS, prefills, strict=True)],
            "decode": [[*shape, s] for shape, s in zip(DECODES, decodes, strict=True)],
        },
    }
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
