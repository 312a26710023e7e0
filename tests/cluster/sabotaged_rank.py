"""The product's rank process whose further ranks cannot load their weights, for the vote at start-up."""

from typing import Any

from tailrace.cluster import rank
from tailrace.model.errors import ConfigError


def fail(*args: Any, **options: Any) -> None:
    raise ConfigError("layers.1.up_proj.weight: the file ends before it")


def set_thread_environment(threads: int | None, tp: int = 1) -> int:
    count = before(threads, tp)
    from tailrace.cluster import follower  # imports torch, which may be done only now

    follower.load_weights = fail
    return count


before = rank.set_thread_environment
rank.set_thread_environment = set_thread_environment
rank.main()
