"""Replay: the windows of DeepSeek V4.1's upper half, made anew from the last tokens of a prompt.

No layer from the boundary on makes rows that grow (csa2_config.py), so a context worker may stop there: it leaves the
rows of all owners, the boundary's included, open tails, ids, and the windows of the lower layers. What a generation
worker lacks are the windows of the upper layers. It sends the prompt's last R tokens through the model again, with no
window in front of the first of them, and so has the windows and the first token's logits. Two ways, by what was kept:

    resume    the state after the first N - R tokens is there: an ordinary step over the rest, in as many chunks as you
              like, but that upper windows begin at N - R. The lower half is exact whatever R is.
    rebuild   the state after all N tokens is there: rows that grow, tails and ids are left as they are, and lower
              windows are read where they are kept (the last `window` tokens) and computed where not. One step. The
              same makes all windows where a prefix index has only rows that grow.

A token's upper output is made of the lower outputs of the L (window - 1) tokens in front of it, L being the number of
layers above, so R = L (window - 1) + 1 is exact; by rebuilding, the lower half, which has no window in front of its
first token either, needs as much again for its own layers. Fewer tokens are an approximation of the upper windows
alone: rows that grow depend on the lower half, stay exact, and may be published as such. Largest error of a logit (of a
spread of 1) of the first 20 tokens, median of 5 random models of 4 layers below and 5 above, by R in windows of 16:

    R / window    1       2       3       4       6       from 4.7 on (resume), 8.5 on (rebuild)
    resume        5e-1    8e-2    7e-3    9e-4    0       0
    rebuild       1       7e-1            1e-1    5e-3    0

so with the same R `resume` is the better by far. Fewer tokens than a window are refused. Source: DeepSeek V4.1's model
card (its upper half needs no prefill) and the replay modes of public engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.csa2_step import SequencePart, plan_windows
from tailrace.model.engram import NOTHING
from tailrace.model.replay_policy import ReplayPolicy
from tailrace.model.row_store import RowPool


def resume(
    decoder: Csa2Decoder,
    ids: torch.Tensor,
    positions: torch.Tensor,
    pool: RowPool,
    rows: Sequence[RowSpan],
    replay_from: Sequence[int],
) -> torch.Tensor:
    """As decoder.forward, for sequences whose upper windows begin at positions `replay_from`, one a row.

    Once `window` tokens have gone through nothing is missing, and decoder.forward does the same.
    """
    late = [replace(row, upper_from=start) for row, start in zip(rows, replay_from, strict=True)]
    return decoder.forward(ids, positions, pool, late)


def rebuild(
    decoder: Csa2Decoder,
    tail: Sequence[int],
    num_tokens: int,
    pool: RowPool,
    table: np.ndarray,
    policy: ReplayPolicy,
    *,
    only_history: bool = False,
) -> torch.Tensor:
    """Upper windows of one sequence whose lower half is there after `num_tokens` tokens.

    Args:
        tail: the prompt's last ids, policy.tail_tokens of them or the whole prompt.
        table: the sequence's pages; rows that grow are not written.
        only_history: nothing but rows that grow is there, as after a hit in a prefix index: lower windows and ids are
            made as well. num_tokens is then a multiple of every ratio, so that no tail is open.

    Returns:
        [min(policy.decoder, num_tokens), hidden_size] after the final norm, of the last tokens.

    Raises:
        ConfigError: the policy makes less than a window.
        ValueError: `tail` is too short, or a tail is open of which nothing is there.
    """
    config = decoder.config
    policy.checked(config)
    if only_history and decoder.layout.is_open(num_tokens):
        raise ValueError(f"after {num_tokens} tokens a tail is open: rows that grow do not hold it")
    count, upper = min(policy.encoder, num_tokens), min(policy.decoder, num_tokens)
    start = num_tokens - count
    lookback = 0 if config.engram is None else min(config.engram.lookback, start)
    if len(tail) < count + lookback:
        raise ValueError(f"replay of {count} tokens needs the prompt's last {count + lookback} ids, not {len(tail)}")
    ids = torch.tensor(tail[len(tail) - count :], dtype=torch.int64)
    before = None
    if decoder.engram is not None:
        seen = decoder.engram.classes(torch.tensor(tail[len(tail) - count - lookback : len(tail) - count]).long())
        before = functional.pad(seen, (decoder.engram.config.lookback - len(seen), 0), value=NOTHING)
    window = config.window
    kept = plan_windows(start, count, window, range(max(0, num_tokens - window), num_tokens), are_kept=False)
    part = SequencePart(
        at=slice(0, count),
        start=start,
        rows=pool.of(table),
        lower=plan_windows(start, count, window, range(0)) if only_history else kept,
        upper=plan_windows(num_tokens - upper, upper, window, range(0)),
        before=before,
        writes=False,
    )
    if only_history:
        decoder.keep_classes(ids, part)
    return decoder.run(ids, torch.arange(start, num_tokens), [part], num_upper=upper)
