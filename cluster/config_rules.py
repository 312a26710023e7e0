"""Rules over the whole configuration: values that this release cannot honour, and fields that must fit together.

Each rule yields lines that begin with the key at fault. A value refused here is one that would otherwise be silently
ignored or fail late; the reason says what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tailrace.cluster.config import TailraceConfig

NO_GPU_PATH = "is not in this release's GPU path"

HOST_TRANSPORTS = ("shm", "nixl", "ucx", "ray")


@dataclass(frozen=True, slots=True)
class Later:
    """A value that waits for a later release. `path`: dotted key; `refused`: is this value one of them?"""

    path: str
    refused: Callable[[Any], bool]
    reason: str


LATER: tuple[Later, ...] = (
    Later("dtype", lambda v: v == "float16", NO_GPU_PATH + ", nor in the CPU's: use bfloat16 or float32"),
    Later(
        "transport",
        lambda v: v == "in_process",
        "is a test double inside one process, and ctx and gen are separate processes: use shm, nixl or ucx",
    ),
    Later("defer_gen_receives", bool, NO_GPU_PATH),
    Later(
        "enable_client_io_during_gpu_wait",
        bool,
        NO_GPU_PATH + ": frames are a thread's of their own, which never waits",
    ),
    Later("host_cache_bytes", lambda v: v > 0, "the host tier is not in this release: use 0"),
    Later("host_cache_bind_to_gpu_numa_node", bool, NO_GPU_PATH),
    Later("allow_remote_numa_fallback", bool, "only has a meaning beside host_cache_bind_to_gpu_numa_node"),
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
    sizes = {"": c.tokens_per_page, "ctx.": c.ctx.tokens_per_page, "gen.": c.gen.tokens_per_page}
    for where, tokens in sizes.items():
        if tokens is not None and c.block_tokens % tokens and tokens % c.block_tokens:
            yield (
                f"{where}tokens_per_page: {tokens} neither divides block_tokens ({c.block_tokens}) "
                "nor is a multiple of it"
            )
    if c.codec == "raw" and c.page_dtype("ctx") != c.page_dtype("gen"):
        yield (
            f"codec: 'raw' brings no pages of {c.page_dtype('ctx')} (ctx) into pages of {c.page_dtype('gen')} (gen): "
            "choose a codec, or one dtype"
        )
    if c.weights == "quantized" and c.gen.tp > 1:
        yield f"weights: quantized weights are not split over ranks, and gen.tp is {c.gen.tp}: use dense or gen.tp 1"
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
    yield from _device(c)
    yield from _replay(c)
    if c.backflow:
        yield from _back_flow(c)
    if c.transport == "ray":
        yield from _whole_tensors(c)
    if c.codecs_allowed and c.codec != "auto":
        yield f"codecs_allowed: {', '.join(c.codecs_allowed)} may be chosen by codec 'auto', and codec is {c.codec!r}"
    if len(set(c.codecs_allowed)) != len(c.codecs_allowed):
        yield "codecs_allowed: a codec stands there twice"
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
    yield from _keys(c)


def unfit_for_cuda(c: TailraceConfig) -> Iterator[str]:
    """What workers whose weights and pages stand on a GPU cannot do, one line each."""
    if c.weights == "quantized":
        yield "weights: 'quantized' is a product of CPUs: use dense"
    for role in ("ctx", "gen"):
        if c.pool(role).tp > 1:
            yield f"{role}.tp: {c.pool(role).tp} ranks on GPUs are not in this release: use 1"
    for key, values in (("dtype", c.page_dtype), ("tokens_per_page", c.page_tokens)):
        if values("ctx") != values("gen"):
            both = f"{values('gen')!r} and {values('ctx')!r} (ctx)"
            yield f"gen.{key}: {both}, and pages on GPUs are read as they are"
    if c.transport in HOST_TRANSPORTS:
        yield f"transport: {c.transport!r} moves pages that stand in host memory: use auto"
    if c.backflow:
        yield "backflow: ctx reads pages of gens that stand in host memory"
    if c.verify_pages:
        yield "verify_pages: sums are taken of pages that stand in host memory"


def _device(c: TailraceConfig) -> Iterator[str]:
    if c.device == "cuda":
        yield from (f"{line} (device is 'cuda')" for line in unfit_for_cuda(c))
    for key in ("capture_batch_sizes", "sampling_variants"):
        if getattr(c, key) is not None and c.device != "cuda":
            yield f"{key}: CUDA graphs need device: cuda, said explicitly; it is {c.device!r}"
    if c.run_ahead and c.device != "cuda":
        yield f"run_ahead: {c.run_ahead} needs device: cuda, said explicitly; it is {c.device!r}"
    if c.run_ahead and c.shadow_check_every:
        yield f"run_ahead: {c.run_ahead} leaves no pause between passes, in which shadow_check_every computes"
    if c.transport == "peer" and c.device != "cuda":
        yield f"transport: 'peer' reads pages on a GPU and needs device: cuda, said explicitly; it is {c.device!r}"
    if c.peer_sms is not None and c.device == "cpu":
        yield f"peer_sms: {c.peer_sms} programs of a GPU, and device is 'cpu'"
    largest = max(c.capture_batch_sizes or (0,))
    if largest > c.max_batch_size:
        yield f"capture_batch_sizes: {largest} is over max_batch_size ({c.max_batch_size})"


def unfit_for_rows(c: TailraceConfig) -> Iterator[str]:
    """What cannot be done with pages that only their model can take apart, one line each."""
    wrong = {
        "codec": c.codec if c.codec != "raw" else None,
        "weights": c.weights if c.weights != "dense" else None,
        "ctx.tp": c.ctx.tp if c.ctx.tp > 1 else None,
        "gen.tp": c.gen.tp if c.gen.tp > 1 else None,
        "backflow": c.backflow or None,
        "shadow_check_every": c.shadow_check_every or None,
        "device": c.device if c.device == "cuda" else None,
    }
    for key, value in wrong.items():
        if value is not None:
            yield f"{key}: {value!r} needs pages of plain keys and values"
    ctx, gen = (c.page_tokens_said(role) or "unset" for role in ("ctx", "gen"))
    if ctx != gen:
        yield f"gen.tokens_per_page: {gen} and {ctx} (ctx) must be the same"
    if c.page_dtype("ctx") != c.page_dtype("gen"):
        yield f"gen.dtype: {c.page_dtype('gen')} and {c.page_dtype('ctx')} (ctx) must be the same"


def _keys(c: TailraceConfig) -> Iterator[str]:
    """A bearer key says who asks, so it stands once in the whole file."""
    seen: set[str] = set()
    places = {"api_keys": c.api_keys} | {f"tenants.{name}.api_keys": t.api_keys for name, t in c.tenants.items()}
    for path, keys in places.items():
        words = [key.get_secret_value() for key in keys]
        if len(set(words)) != len(words):
            yield f"{path}: a key stands there twice"
        if seen.intersection(words):
            yield f"{path}: a key stands elsewhere too"
        if any(len(word) < 8 for word in words):
            yield f"{path}: a key is shorter than 8 characters"
        seen.update(words)


def _back_flow(c: TailraceConfig) -> Iterator[str]:
    """Ctx reads gen's memory, and only what ctx itself would have computed may be found there."""
    if c.transport in ("nixl", "ucx"):
        yield f"backflow: ctx reads gens over shared memory only, and transport is {c.transport!r}: use auto or shm"
    if c.weights == "quantized":
        yield "backflow: gens decode on quantized weights, so their pages are not those that ctx would compute"
    if c.page_dtype("ctx") != c.page_dtype("gen"):
        yield f"backflow: pages of {c.page_dtype('gen')} (gen) do not become pages of {c.page_dtype('ctx')} (ctx)"


def _whole_tensors(c: TailraceConfig) -> Iterator[str]:
    """What Ray, which moves whole tensors as they are, cannot do."""
    wrong = {
        "codec": c.codec if c.codec != "raw" else None,
        "ctx.tp": c.ctx.tp if c.ctx.tp > 1 else None,
        "gen.tp": c.gen.tp if c.gen.tp > 1 else None,
        "backflow": c.backflow or None,
    }
    for key, value in wrong.items():
        if value is not None:
            yield f"{key}: {value!r} is unsupported with transport ray, which moves whole tensors as they are"
    for key in ("tokens_per_page", "dtype"):
        ctx, gen = (getattr(c.pool(role), key) or getattr(c, key) for role in ("ctx", "gen"))
        if ctx != gen:
            yield (
                f"gen.{key}: {gen} and {ctx} (ctx) are unsupported with transport ray, "
                "which moves whole tensors as they are"
            )


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


LOOKBACK = 3
"""Ids in front of a replay that its first token looks back at."""


def _replay(c: TailraceConfig) -> Iterator[str]:
    """Whether the model can do it is said by cluster/sizes.py."""
    said = {key: value for key in ("decoder", "encoder") if (value := getattr(c.replay, key)) is not None}
    if c.handoff_mode == "full":
        for key, value in said.items():
            yield f"replay.{key}: {value} has no meaning with handoff_mode 'full': use bounded_replay_on_generation"
        return
    if len(said) == 2 and said["encoder"] < said["decoder"]:
        yield f"replay.encoder: {said['encoder']} is less than replay.decoder ({said['decoder']})"
    if said:
        yield from short_tail(c, max(said.values()))


def short_tail(c: TailraceConfig, replayed: int) -> Iterator[str]:
    """Gen must have the ids of what it replays, and those in front that it looks back at."""
    tail = c.gen_prompt_tail_tokens
    if tail is not None and tail < replayed + LOOKBACK:
        yield (
            f"gen_prompt_tail_tokens: {tail} is less than {replayed + LOOKBACK}: the {replayed} tokens that gen "
            f"replays (handoff_mode) and {LOOKBACK} in front of them"
        )
