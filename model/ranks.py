"""The sum over the ranks of one worker, by gloo between processes of one host.

Ranks meet over a small file that their supervisor made and that they inherited, and talk over TCP on the loopback
address. A rank that dies breaks the others' next sum with an error within milliseconds; one that is stopped makes them
wait, and their supervisor sees all of them without progress. Waiting threads sleep.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from tailrace.model.errors import WorkerError
from tailrace.model.shard import Shard

_LOOPBACK = "127.0.0.1"
_dist: Any = torch.distributed  # its stubs lack the options of gloo


class AllReduce:
    """Sums tensors of one shape over all ranks; every rank must call it in the same order.

    Args:
        shard: which rank this is, of how many.
        meeting_point: path of an empty file that all ranks can write, used once.
        limit_s: how long a rank may be waited for, here and in each sum.

    Raises:
        WorkerError: not all ranks came in time.
    """

    def __init__(self, shard: Shard, meeting_point: str, limit_s: float) -> None:
        self._shard = shard
        options = _dist.ProcessGroupGloo._Options()
        options._threads = 1
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timedelta(seconds=limit_s)
        try:
            store = _dist.FileStore(meeting_point, shard.tp)
            store.set_timeout(timedelta(seconds=limit_s))
            self._group = _dist.ProcessGroupGloo(store, shard.rank, shard.tp, options)
        except RuntimeError as error:
            raise WorkerError(f"rank {shard.rank} of {shard.tp} did not meet the others: {error}") from error

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, added in float32 whatever their dtype; equal to the bit on every rank.

        Raises:
            WorkerError: a rank is gone, or did not come in time.
        """
        whole = part.float()  # itself, if it is float32
        try:
            self._group.allreduce([whole]).wait()
        except RuntimeError as error:
            raise WorkerError(f"rank {self._shard.rank} of {self._shard.tp} lost the others: {error}") from error
        return whole
