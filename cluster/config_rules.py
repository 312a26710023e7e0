"""Rules over the whole configuration: values that this release cannot honour, and fields that must fit together.

Each rule yields lines that begin with the key at fault. A value refused here is one that would otherwise be silently
ignored or fail late; the reason says what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tailrace.cluster.config import TailraceConfig

NO_GPU_PATH = "needs the GPU path, which this release does not have"


@dataclass(frozen=True, slots=True)
class Later:
    """A value that waits for a later release. `path`: dotted key; `refused`: is this value one of them?"""

    path: str
    refused: Callable[[Any], bool]
    reason: str


LATER: tuple[Later, ...] = (
    Later("dtype", lambda v: v == "float16", NO_GPU_PATH + "; on the CPU use bfloat16 or float32"),
    Later("ctx.tp", lambda v: v > 1, "tensor parallelism is not in this release: use 1"),
    Later("gen.tp", lambda v: v > 1, "tensor parallelism is not in this release: use 1"),
    Later("placement", lambda v: v == "prefix", "needs cache events, which workers do not send yet"),
    Later(
        "transport",
        lambda v: v == "in_process",
        "is a test double inside one process, and ctx and gen are separate processes: use shm or nixl",
    ),
    Later("transport", lambda v: v == "peer", NO_GPU_PATH),
    Later("transport", lambda v: v == "ucx", "is not in this release: use nixl"),
    Later("transport", lambda v: v == "ray", "is the benchmarks' baseline and not in this release: use shm or nixl"),
    Later(
        "transceiver_runtime", lambda v: v == "ray", "is the benchmarks' baseline and not in this release: use python"
    ),
    Later("codec", lambda v: v != "raw", "is not in this release: use raw"),
    Later("verify_pages", bool, "page sums are not in this release"),
    Later("capture_batch_sizes", lambda v: v is not None, "CUDA graphs: " + NO_GPU_PATH),
    Later("sampling_variants", lambda v: v is not None, "CUDA graphs: " + NO_GPU_PATH),
    Later("peer_sms", lambda v: v is not None, NO_GPU_PATH),
    Later("defer_gen_receives", bool, NO_GPU_PATH),
    Later("enable_client_io_during_gpu_wait", bool, NO_GPU_PATH),
    Later("run_ahead", lambda v: v > 0, NO_GPU_PATH),
    Later("host_cache_bytes", lambda v: v > 0, "the host tier is not in this release: use 0"),
    Later("host_cache_bind_to_gpu_numa_node", bool, NO_GPU_PATH),
    Later("allow_remote_numa_fallback", bool, "only has a meaning beside host_cache_bind_to_gpu_numa_node"),
    Later("handoff_mode", lambda v: v != "full", "needs a family with derived state, and there is none yet: use full"),
    Later("replay.encoder", lambda v: v is not None, "needs a family with derived state, and there is none yet"),
    Later("replay.decoder", lambda v: v is not None, "needs a family with derived state, and there is none yet"),
    Later("backflow", bool, "is not in this release"),
    Later("shadow_check_every", lambda v: v > 0, "the shadow check is not in this release: use 0"),
    Later("max_migrations_in_flight", lambda v: v is not None, "migration is not in this release"),
    Later("prompt_token_cache", bool, "is not in this release"),
    Later("tenants", bool, "fair shares and rates are not in this release"),
)


def value_at(config: TailraceConfig, path: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def problems(config: TailraceConfig) -> list[str]:
    """Every rule that `config` breaks, one line each; empty if it can be served."""
    lines = [*_together(config)]
    said = {line.split(":", 1)[0] for line in lines}
    for rule in LATER:
        value = value_at(config, rule.path)
        if rule.path not in said and rule.refused(value):
            lines.append(f"{rule.path}: {_shown(value)} {rule.reason}")
    return lines


def _shown(value: object) -> str:
    return ", ".join(value) if isinstance(value, dict) else repr(value)


def _together(c: TailraceConfig) -> Iterator[str]:
    if c.block_tokens % c.tokens_per_page and c.tokens_per_page % c.block_tokens:
        yield (
            f"tokens_per_page: {c.tokens_per_page} neither divides block_tokens ({c.block_tokens}) "
            "nor is a multiple of it"
        )
    if c.max_num_tokens < c.max_batch_size:
        yield (
            f"max_num_tokens: {c.max_num_tokens} is less than max_batch_size ({c.max_batch_size}): "
            "a full batch would not fit in one pass"
        )
    if (c.transport == "ray") != (c.transceiver_runtime == "ray"):
        yield (
            f"transceiver_runtime: {c.transceiver_runtime!r} does not go with transport {c.transport!r}: "
            "transport ray and transceiver_runtime ray imply each other"
        )
    yield from _prompt_tail(c)
    if c.local_prefill == "never" and c.local_prefill_max_tokens not in ("auto", 0):
        yield (
            f"local_prefill_max_tokens: {c.local_prefill_max_tokens} asks a gen to prefill short prompts, "
            "and local_prefill 'never' forbids it"
        )
    if c.heartbeat_s * 3 > c.request_lease_s:
        yield (
            f"request_lease_s: {c.request_lease_s} is less than three times heartbeat_s ({c.heartbeat_s}): "
            "one late frame would cancel living requests"
        )
    if c.heartbeat_s * 2 > c.pin_lease_s:
        yield f"pin_lease_s: {c.pin_lease_s} is less than twice heartbeat_s ({c.heartbeat_s})"
    if len({key.get_secret_value() for key in c.api_keys}) != len(c.api_keys):
        yield "api_keys: a key stands there twice"
    if any(len(key.get_secret_value()) < 8 for key in c.api_keys):
        yield "api_keys: a key is shorter than 8 characters"


def _prompt_tail(c: TailraceConfig) -> Iterator[str]:
    tail = c.gen_prompt_tail_tokens
    if tail is None:
        return
    if tail < c.block_tokens:
        yield f"gen_prompt_tail_tokens: {tail} is less than block_tokens ({c.block_tokens})"
    if c.transceiver_runtime != "python":
        yield (
            f"gen_prompt_tail_tokens: {tail} needs transceiver_runtime: python, said explicitly; "
            f"it is {c.transceiver_runtime!r}"
        )
