"""A further rank of a worker in the tests of the engine: a real process that runs the product's own follower loop.

usage: follower_process.py CHANNEL_FD        jobs come on stdin, a JSON line each; a Stop ends a job, not the process
"""

import json
import socket
import sys
from pathlib import Path

import torch

from tailrace.engine.engine import TORCH_DTYPES, pool_tensor
from tailrace.engine.forward import Forward
from tailrace.engine.group import Channel, Vote, follow
from tailrace.kv_cache.arena import Arena
from tailrace.kv_cache.layout import single_layout
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.ranks import AllReduce
from tailrace.model.shard import Shard
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights

torch.set_num_threads(1)
channel = Channel(socket.socket(fileno=int(sys.argv[1])), "rank 0")
for line in sys.stdin:
    job = json.loads(line)
    shard = Shard(job["rank"], job["tp"])
    source = open_source(job["model"])
    weights = load_weights(source, dtype=TORCH_DTYPES[job["dtype"]], quantized=False, shard=shard)
    layout = single_layout(state_groups(weights.config), job["tokens_per_page"], job["dtype"])
    arena = Arena.open_own(job["arena"], Path(job["directory"]))
    channel.send(Vote(""))
    decoder = Decoder(weights, AllReduce(shard, job["meeting"], 30.0))
    follow(channel, Forward(decoder, pool_tensor(arena.pages, layout)), lambda serving: None)
