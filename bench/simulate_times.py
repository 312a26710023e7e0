"""How long a simulated worker takes, and where each number comes from.

    prefill   pass_s + token_s a computed token + pair_s a (computed, attended) pair of tokens
    decode    step_s + row_s a row + context_token_s a token of context in the batch
    pages     bytes over a link's rate; blocks from the host over the copy's rate

A pass that does both pays both. Sources are named in every row. Knows no request and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Times in seconds, rates in bytes a second.

    Attributes:
        source: where the numbers are from.
        transfer_bytes_per_s: of one gen's link; hand-offs share it in turn.
        host_copy_bytes_per_s: of blocks that the host tier has, in the pass that begins with them.
    """

    source: str
    pass_s: float
    token_s: float
    pair_s: float
    step_s: float
    row_s: float
    context_token_s: float
    bytes_per_token: float
    transfer_bytes_per_s: float
    host_copy_bytes_per_s: float

    def prefill_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """One pass over (new tokens, tokens before them) of each sequence."""
        tokens = pairs = 0.0
        for new, past in chunks:
            tokens += new
            pairs += new * (past + new / 2)
        return self.pass_s + self.token_s * tokens + self.pair_s * pairs if tokens else 0.0

    def decode_s(self, rows: int, context: float) -> float:
        """One step of a batch whose sequences have `context` tokens together."""
        return self.step_s + self.row_s * rows + self.context_token_s * context if rows else 0.0

    def transfer_s(self, tokens: int) -> float:
        return tokens * self.bytes_per_token / self.transfer_bytes_per_s

    def host_copy_s(self, tokens: int) -> float:
        return tokens * self.bytes_per_token / self.host_copy_bytes_per_s


PROFILES = {
    "h200": ServiceTimes(
        "bench/simulate_card.py on one NVIDIA H200: Llama 3 8B's shapes, random bf16 weights, plain torch 2.11, "
        "medians fitted (worst shape 44 % off); link: NIXL in 1 MiB pages between two H200, 146 GB/s",
        pass_s=5.24e-3, token_s=1.967e-5, pair_s=2.309e-9, step_s=5.98e-3, row_s=0.0, context_token_s=2.773e-8,
        bytes_per_token=131072, transfer_bytes_per_s=146e9, host_copy_bytes_per_s=55.5e9,
    ),
    "cpu": ServiceTimes(
        "README's rows on two EPYC cores, SmolLM2-135M: cpu.prefill.512 2,631 tokens/s, cpu.decode.b1 111 and "
        "cpu.decode.b8 370 tokens/s, transfer.shm.16k 10.7 GB/s; no attention term, which those rows do not measure",
        pass_s=0.0, token_s=1 / 2631, pair_s=0.0, step_s=7.2e-3, row_s=1.8e-3, context_token_s=0.0,
        bytes_per_token=23040, transfer_bytes_per_s=10.7e9, host_copy_bytes_per_s=10.7e9,
    ),
    "flat": ServiceTimes(
        "the fakes of bench/routing.py: 200,000 prompt tokens/s, first in first out, nothing else costs time",
        pass_s=0.0, token_s=5e-6, pair_s=0.0, step_s=1e-3, row_s=0.0, context_token_s=0.0,
        bytes_per_token=1.0, transfer_bytes_per_s=1e12, host_copy_bytes_per_s=1e12,
    ),
}  # fmt: skip
