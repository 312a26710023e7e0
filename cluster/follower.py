"""A further rank of a tensor parallel worker: its pages, its share of the weights, and the loop that rank 0 leads.

It has no scheduler, no links and no sampler, and decides nothing: what it computes comes from rank 0 over the socket
that it inherited (engine/group.py). It ends in order when rank 0 says so, and with a failure when rank 0 or another
rank is gone; its supervisor ends all ranks when one of them ends.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.progress import Phase
from tailrace.cluster.sizes import derive
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.ties import Ties
from tailrace.engine.engine import TORCH_DTYPES, pool_tensor
from tailrace.engine.forward import Forward
from tailrace.engine.group import IDLE_WAIT_S, Channel, Join, Make, Vote, follow
from tailrace.kv_cache.arena import Arena
from tailrace.model.decoder import Decoder
from tailrace.model.errors import TailraceError, WorkerError
from tailrace.model.ranks import AllReduce
from tailrace.model.shard import Shard
from tailrace.model.source import open_source
from tailrace.model.weights import Weights, load_weights

Progress = Callable[[Phase, float], None]


def run_follower(spec: RankSpec, config: TailraceConfig, ties: Ties, threads: int, progress: Progress) -> None:
    """Load, meet the others, and run what rank 0 says, until it says Stop.

    Raises:
        TailraceError: it cannot load, which rank 0 has been told; or a rank is gone.
    """
    torch.set_num_threads(threads)
    channel = Channel(socket.socket(fileno=ties.channels[0]), "rank 0")
    shard = Shard(spec.rank, config.pool(spec.role).tp)
    make = await_message(channel, Make, progress)
    try:
        weights, pages = _load(spec, config, shard, make.arena, progress)
    except TailraceError as error:
        channel.send(Vote(str(error)))
        raise
    channel.send(Vote(""))
    await_message(channel, Join, progress)
    decoder = Decoder(weights, AllReduce(shard, ties.meeting_point, meeting_limit_s(config)))
    forward = Forward(decoder, pages, threads=threads)
    progress("compile", 0.0)
    follow(channel, forward, lambda serving: progress("run" if serving else "compile", 1.0 if serving else 0.0))


def await_message(channel: Channel, kind: type[Any], progress: Progress) -> Any:
    """The next message, which must be of this kind; waiting for it is loading that gets on."""
    while (message := channel.receive(IDLE_WAIT_S)) is None:
        progress("load", 1.0)
    if not isinstance(message, kind):
        raise WorkerError(f"{type(message).__name__} came where {kind.__name__} was due")
    return message


def meeting_limit_s(config: TailraceConfig) -> float:
    """How long a rank may keep the others waiting; before that the supervisor sees that it does not get on."""
    return max(config.compile_limit_s, config.run_limit_s)


def _load(
    spec: RankSpec, config: TailraceConfig, shard: Shard, arena: str, progress: Progress
) -> tuple[Weights, torch.Tensor]:
    source = open_source(config.model)
    layout = derive(config, source.config).rank_layout(spec.role)
    pages = pool_tensor(Arena.open_own(arena).pages, layout)
    weights = load_weights(
        source,
        dtype=TORCH_DTYPES[config.page_dtype(spec.role)],
        quantized=False,
        progress=lambda done, total: progress("load", done / total),
        shard=shard,
    )
    return weights, pages
