"""What an operator may say: one frozen tree of settings, checked once at the edge.

`load_config` takes the mapping under `applications[0].args` of a Serve YAML (or a bare mapping) and returns a
TailraceConfig or raises ConfigError with one line a problem: the key's path, what is wrong, and for an unknown key the
nearest known one. Unknown keys are refused at every level, since Serve's own schema lets them pass. Values that this
release cannot honour are refused here with the reason (`cluster/config_rules.py`), never ignored.

Knows nothing of the model: what depends on its shape (pages, longest request) is derived in `cluster/sizes.py`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    Strict,
    ValidationError,
    model_validator,
)

from tailrace.model.errors import ConfigError

Status = Literal["stable", "prototype"]

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?) ?(B|KiB|MiB|GiB|TiB)$")

# Options of the decode side: written under `ctx` they would silently do nothing, so they are refused there by name.
DECODE_ONLY = frozenset(
    {
        "capture_batch_sizes",
        "defer_gen_receives",
        "enable_client_io_during_gpu_wait",
        "gen_prompt_tail_tokens",
        "local_prefill",
        "local_prefill_max_tokens",
        "max_batch_size",
        "max_gen_init_admissions_per_pass",
        "peer_sms",
        "run_ahead",
        "sampling_variants",
    }
)


def setting(default: Any, doc: str, *, status: Status = "stable", **bounds: Any) -> Any:
    """A field with its docs line and status; both go into the schema and docs/configuration.md."""
    return Field(default, description=doc, json_schema_extra={"x-status": status}, **bounds)


def section(kind: type[BaseModel], doc: str) -> Any:
    """A nested section with all its defaults."""
    return Field(default_factory=kind, description=doc, json_schema_extra={"x-status": "stable"})


def parse_size(value: object) -> object:
    """`1GiB`, `512 MiB` -> bytes; anything else is left to the field's own check."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise ValueError(f"{value!r} is no size: write bytes as a number, or a number with KiB, MiB, GiB or TiB")
        return int(float(match[1]) * _UNITS[match[2]])
    return value


def _size_type(minimum: int) -> Any:
    """An int type of at least `minimum` bytes, written as a number or a size like 1GiB; the schema shows both."""
    written = Annotated[int, Field(ge=minimum)] | Annotated[str, Field(pattern=_SIZE.pattern)]
    return Annotated[int, Field(ge=minimum), BeforeValidator(parse_size, json_schema_input_type=written)]


if TYPE_CHECKING:
    PoolBytes = ChunkBytes = BodyBytes = TierBytes = int
else:
    PoolBytes, ChunkBytes, BodyBytes, TierBytes = (_size_type(n) for n in (1, 4096, 1024, 0))
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.\[\]:_-]+)$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Ints = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(False)]


class Section(BaseModel):
    """Base of every level: frozen, strict types, unknown keys refused with a suggestion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: object) -> object:
        if isinstance(data, dict):
            problems = [cls._unknown(str(key)) for key in data if key not in cls.model_fields]
            if problems:
                raise ValueError("; ".join(problems))
        return data

    @classmethod
    def _unknown(cls, key: str) -> str:
        near = difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.5)
        return f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


class Placement(Section):
    """Where Ray puts a deployment's replicas."""

    num_cpus: float = setting(
        0.1, "Logical CPUs a replica asks Ray for; fractions are fine, it limits nothing.", ge=0, le=1024
    )
    resources: dict[str, float] = setting(
        {}, "Custom Ray resources a replica asks for, e.g. {ctx: 1} on hosts that announce them."
    )
    labels: dict[str, str] = setting({}, "Ray node labels a replica's host must have, e.g. {pool: ctx}.")

    @model_validator(mode="after")
    def _amounts(self) -> Self:
        for name, amount in self.resources.items():
            if not name or amount <= 0:
                raise ValueError(f"resources: {name!r} asks for {amount}; amounts are above 0 and names not empty")
        return self


class Pool(Placement):
    """One of the two pools of workers."""

    replicas: int = setting(1, "Workers in the pool.", ge=1, le=4096)
    tp: Literal[1, 2, 4, 8] = setting(
        1, "Rank processes that share one worker's model (tensor parallelism), all on one host."
    )
    kv_bytes: PoolBytes | None = setting(
        None, "Page pool of each worker here, all its ranks together; unset: the top-level kv_bytes."
    )
    tokens_per_page: int | None = setting(
        None, "Tokens a page of these workers; unset: the top-level tokens_per_page.", ge=1, le=1024
    )
    dtype: Literal["bfloat16", "float32"] | None = setting(
        None, "Storage and arithmetic type of these workers; unset: the top-level dtype. Differing ones need a codec."
    )
    threads: int | None = setting(
        None,
        "Threads of one rank's tensor work; unset: the cores this process may use, divided by tp.",
        ge=1,
        le=1024,
    )
    num_gpus: float | None = setting(
        None,
        "GPUs that a worker here asks Ray for; Ray shows a process no others. A part of one lets workers share it. "
        "Unset: 1 with device cuda, else none.",
        status="prototype",
        ge=0,
        le=1,
    )


class CtxPool(Pool):
    """Workers that compute prompts."""

    @classmethod
    def _unknown(cls, key: str) -> str:
        if key in DECODE_ONLY:
            return f"key {key!r} is a decode-only option and a ctx worker never decodes: set it at the top level"
        return _misplaced(key) or super()._unknown(key)


class GenPool(Pool):
    """Workers that decode."""

    drafts: int = setting(
        0,
        "Tokens that the model's own draft block guesses for a sequence and step, verified in the next; 0: none. "
        "Answers stay the same; ctx computes the block for prompts, too. DeepSeek V3, V3.2, V4 (one token), V4.1 (a "
        "block).",
        status="prototype",
        ge=0,
        le=16,
    )

    @classmethod
    def _unknown(cls, key: str) -> str:
        return _misplaced(key) or super()._unknown(key)


class IngressPool(Placement):
    """HTTP replicas: OpenAI API, tokenization, the flow of each request."""

    replicas: int = setting(
        1, "HTTP replicas; each serves alone, one dying takes only its own connections.", ge=1, le=1024
    )
    tokenizer_threads: int = setting(2, "Threads that render and tokenize prompts, off the event loop.", ge=1, le=64)


class RouterPlace(Placement):
    """The one router: admission, placement, operators' port."""


class Replay(Section):
    """How much of a prompt's end is left to gen by handoff_mode bounded_replay_on_generation."""

    encoder: int | None = setting(
        None,
        "Tokens at a prompt's end that gen sends through the lower layers; unset: as many as decoder. More change "
        "nothing but who computes them.",
        status="prototype",
        ge=1,
    )
    decoder: int | None = setting(
        None,
        "Tokens at a prompt's end that go through the upper layers, a window at least; unset: two windows. Fewer than "
        "layers x (window - 1) + 1 are an approximation.",
        status="prototype",
        ge=1,
    )


class Tenant(Section):
    """One tenant's share."""

    weight: float = setting(
        1.0, "Share of prompt and output tokens while tenants compete, against the others' weights.", gt=0, le=1e6
    )
    rate: float | None = setting(
        None,
        "Prompt and output tokens a second at most, on average; ten seconds' worth may come at once. Above it 429 with "
        "Retry-After.",
        gt=0,
        le=1e9,
    )
    api_keys: Annotated[tuple[SecretStr, ...], Strict(False)] = setting(
        (), "Bearer keys of this tenant, accepted beside the top level's."
    )


class TailraceConfig(Section):
    """The whole configuration of one application."""

    # --- model
    model: str = setting(
        "smollm2", "Embedded model name (smollm2), a Hugging Face checkpoint folder, or a .gguf file.", min_length=1
    )
    model_name: str | None = setting(None, "Name clients use; unset: the model source's own name.", min_length=1)
    dtype: Literal["bfloat16", "float32", "float16"] = setting("bfloat16", "Storage type of pages and arithmetic type.")
    weights: Literal["dense", "quantized"] = setting(
        "dense", "quantized: a gen decodes small batches on the 4-bit weights of a GGUF as they are (CPU, bfloat16)."
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Where workers keep weights and pages and compute; auto takes the GPU if a worker's host has one and all that "
        "is asked for works there (the start log says which and why). cuda: Llama family, one rank, dense weights.",
        status="prototype",
    )
    max_request_tokens: int | None = setting(
        None, "Prompt plus output of one request at most; unset: what the model and the smallest pool allow.", ge=2
    )

    # --- pages and passes
    tokens_per_page: int = setting(
        16,
        "Tokens a page; divides block_tokens or is a multiple of it. Unset, families whose rows have formats of their "
        "own take 128 or the multiple that they need.",
        ge=1,
        le=1024,
    )
    block_tokens: int = setting(64, "Tokens a block hash covers, one value for the cluster.", ge=1, le=4096)
    kv_bytes: PoolBytes = setting(2**30, "Page pool of each worker, in shared or the GPU's memory; bytes or e.g. 1GiB.")
    max_num_tokens: int = setting(512, "Tokens of one pass at most; also the largest prefill chunk.", ge=1, le=131_072)
    max_batch_size: int = setting(32, "Sequences that one pass decodes at most.", ge=1, le=4096)
    capture_batch_sizes: Ints | None = setting(
        None,
        "Batch sizes with a captured CUDA graph; unset: 1, 2, 4, 8, 16 and so on to max_batch_size.",
        status="prototype",
        min_length=1,
    )
    sampling_variants: (
        Annotated[tuple[Literal["greedy", "advanced", "temperature_only"], ...], Strict(False)] | None
    ) = setting(
        None,
        "Sampler variants captured into CUDA graphs; unset: all three. Others run eagerly.",
        status="prototype",
        min_length=1,
    )

    # --- transfer
    transport: Literal["auto", "shm", "nixl", "in_process", "peer", "ucx", "ray"] = setting(
        "auto",
        "How pages move: shm on one host, nixl or ucx between hosts, peer on one host where pages stand on GPUs (no "
        "other moves those); auto probes, in this order, which one works for a pair. ray, the benchmarks' baseline, "
        "moves whole tensors through Ray's object store.",
    )
    codec: Literal["raw", "int8", "fp8", "int4", "lossless", "auto"] = setting(
        "raw",
        "How pages are packed on the wire. int8, fp8 and int4 change answers a little; auto chooses for each pair by "
        "what its link and the codecs are seen to take.",
    )
    codecs_allowed: Annotated[tuple[Literal["int8", "fp8", "int4"], ...], Strict(False)] = setting(
        (), "Lossy codecs that codec auto may choose, beside raw and lossless."
    )
    verify_pages: bool = setting(
        False, "Gen compares sums of every page it got with those ctx took; a wrong page is read again or recomputed."
    )
    pin_lease_s: Seconds = setting(30.0, "How long ctx keeps pages for a reader it hears nothing from.")
    request_lease_s: Seconds = setting(10.0, "A worker cancels work whose ingress has been silent this long.")
    kv_transfer_timeout_s: Seconds = setting(
        10.0, "A hand-off with no new page for this long fails and is bound anew or recomputed."
    )
    transceiver_runtime: Literal["auto", "python", "ray"] = setting(
        "auto", "python is our transceiver, which auto means; ray lets Ray move the pages (baseline)."
    )
    landing_chunks: int = setting(8, "Landing chunks of each gen worker (nixl, ucx, ray).", ge=1, le=1024)
    landing_chunk_bytes: ChunkBytes = setting(
        8 * 2**20, "Size of one landing chunk (nixl, ucx); two pages, if ctx's and gen's differ, at least."
    )
    pairs_per_worker: int = setting(8, "Peers that one worker is paired with at once, at most.", ge=1, le=1024)
    peer_sms: int | None = setting(
        None,
        "GPU programs of the peer read kernel at most, each on an SM that computes less meanwhile; unset: 24.",
        status="prototype",
        ge=1,
        le=1024,
    )
    gen_prompt_tail_tokens: int | None = setting(
        None, "Gen gets only this many last prompt ids; unset: the whole prompt.", ge=256
    )
    max_gen_init_admissions_per_pass: int = setting(8, "Hand-offs that gen admits in one pass at most.", ge=1, le=4096)
    defer_gen_receives: bool = setting(False, "Post reads after the pass's forward is launched.", status="prototype")
    enable_client_io_during_gpu_wait: bool = setting(
        False, "Receive and flush frames while waiting for the GPU.", status="prototype"
    )
    run_ahead: int = setting(
        0,
        "Decode passes launched before the last one's tokens are known (device cuda).",
        status="prototype",
        ge=0,
        le=1,
    )
    transfer_failure_policy: Literal["recompute", "fail"] = setting(
        "recompute", "A failed hand-off is recomputed, or fails its request with a typed error."
    )
    handoff_mode: Literal["full", "bounded_replay_on_generation"] = setting(
        "full",
        "bounded_replay_on_generation (DeepSeek V4.1): ctx leaves out the upper layers and the prompt's end; gen "
        "computes the end and draws the first token, which then waits for the transfer.",
        status="prototype",
    )
    replay: Replay = section(Replay, "How much of a prompt's end is left to gen (handoff_mode).")
    backflow: bool = setting(
        False, "Ctx reads the pages of finished turns from gens on its host, so that the next turn finds them there."
    )
    shadow_check_every: int = setting(
        0, "Gen recomputes the last full block of one hand-off in this many and compares; 0 is off.", ge=0
    )

    # --- host tier
    host_cache_bytes: TierBytes = setting(0, "Host memory tier behind the page pool; 0 is off.", status="prototype")
    host_cache_bind_to_gpu_numa_node: bool = setting(
        False, "Bind the host tier to the GPU's memory node.", status="prototype"
    )
    allow_remote_numa_fallback: bool = setting(
        False, "Take remote host memory where binding fails.", status="prototype"
    )

    # --- routing
    placement: Literal["round_robin", "least_tokens", "least_prefill", "prefix"] = setting(
        "least_prefill",
        "How the router chooses a ctx: the one that is ready first (least_prefill), the same with prefixes kept "
        "together under load (prefix), or without regard to what is cached (least_tokens, round_robin).",
    )
    local_prefill_max_tokens: Literal["auto"] | Annotated[int, Field(ge=0)] = setting(
        "auto", "Prompts of at most this many tokens are prefilled by a gen itself; auto: by predicted cost."
    )
    local_prefill: Literal["auto", "never"] = setting(
        "auto", "auto: a gen prefills itself where it is cheaper or no ctx lives; never: only with a ctx."
    )
    decision_log: str = setting(
        "", "File to which the router writes each placement and what came of it, as JSON lines; empty: none."
    )
    decision_log_bytes: int = setting(
        64 * 2**20, "Size of that file and of the older one beside it, together.", ge=65_536, le=2**40
    )
    retries: bool = setting(True, "Re-place a request whose worker died or lost its pages.")
    prompt_token_cache: bool = setting(
        True,
        "Re-use tokenizations of known prompt prefixes, in at most 64 MiB an ingress and 64 MiB a host; the ids are "
        "those of plain tokenization.",
    )
    tool_parser: Literal["auto", "hermes", "llama3", "mistral"] = setting(
        "auto", "How the model writes tool calls; auto: as its chat template says. Without tools in it: hermes."
    )
    router_wait_s: Seconds = setting(5.0, "An ingress holds new requests this long without a router, then 503.")
    max_queued_requests: int = setting(
        256, "Requests that the router admits but has not begun, at most.", ge=1, le=10**6
    )
    max_queue_wait_s: Seconds = setting(
        20.0,
        "A request that would wait longer than this for its prefill is refused at once; to keep the time to the first "
        "token under load within k times that of an idle cluster, set k - 1 times the latter.",
    )
    max_worker_deaths_per_request: int = setting(
        2, "A request present at this many worker deaths ends as failed.", ge=1, le=100
    )
    max_migrations_in_flight: int = setting(
        8,
        "Requests of dead workers that one ctx, or one gen by itself, prefills anew at once, before new ones.",
        ge=1,
        le=4096,
    )
    breaker_faults: int = setting(
        5, "Faults of a worker in a row, or deaths, after which it gets no more requests.", ge=1, le=1000
    )
    breaker_probe_s: Seconds = setting(2.0, "Time after which one request may try such a worker again.")
    drain_limit_s: Seconds = setting(30.0, "A worker that goes away finishes its streams for at most this long.")

    # --- clients
    api_keys: Annotated[tuple[SecretStr, ...], Strict(False)] = setting(
        (), "Accepted bearer keys, each a tenant of its own; none here nor under tenants: no key is asked for."
    )
    cors_origins: Annotated[tuple[Origin, ...], Strict(False)] = setting(
        (), "Origins whose web pages may call the API, e.g. https://chat.example.org, or *; empty: no CORS headers."
    )
    tenants: dict[Annotated[str, Field(min_length=1, max_length=128)], Tenant] = setting(
        {}, "Shares of named tenants: by their keys, or by X-Tenant where no keys are asked for. Others have weight 1."
    )
    header_wait_s: Seconds = setting(20.0, "Response headers wait this long for the first token or error.")
    slow_reader_s: Seconds = setting(30.0, "A streaming client that takes nothing for this long is cancelled.")
    max_active_requests: int = setting(
        512, "Requests one ingress replica has open at most; above it 503.", ge=1, le=10**6
    )
    max_body_bytes: BodyBytes = setting(16 * 2**20, "Largest request body; above it 413.")
    public_metrics: bool = setting(True, "Serve /metrics and /cluster on the public port too.")

    # --- the cluster
    app_name: str = setting(
        "tailrace", "Names the application's shared memory and its entries in Ray.", pattern=r"^[a-z][a-z0-9_]{0,23}$"
    )
    cluster_secret: SecretStr | None = setting(
        None,
        "Proves to each other that processes belong together; unset: drawn at random when the application starts.",
        min_length=16,
    )
    operators_host: str = setting("0.0.0.0", "Address that the operators' port is bound to.", min_length=1)
    operators_port: int = setting(
        8001, "The router's port for /metrics, /cluster and, with faults, /debug.", ge=0, le=65_535
    )
    ctx: CtxPool = section(CtxPool, "Context workers.")
    gen: GenPool = section(GenPool, "Generation workers.")
    ingress: IngressPool = section(IngressPool, "HTTP replicas.")
    router: RouterPlace = section(RouterPlace, "The router.")

    # --- health
    heartbeat_s: Seconds = setting(0.5, "A worker's heartbeat to the router.")
    stats_period_s: Seconds = setting(1.0, "How often processes report their metrics to the router.")
    health_period_s: Seconds = setting(1.0, "How often Ray Serve asks a replica for its health.")
    load_limit_s: Seconds = setting(600.0, "Loading without progress for this long is stuck.")
    compile_limit_s: Seconds = setting(600.0, "Compiling and warming up without progress for this long is stuck.")
    run_limit_s: Seconds = setting(30.0, "A running loop that ended no pass for this long is stuck and replaced.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting("INFO", "Level of our own log records.")
    flight_recorder_bytes: int = setting(
        2**20, "What a worker's flight recorder keeps, about; 0 switches it off.", ge=0, le=2**30
    )
    flight_recorder_dir: str = setting(
        "", "Where recordings are written; empty: `tailrace-recordings` where the system keeps temporary files."
    )
    faults: bool = setting(False, "Tests only: opens POST /debug/faults on the operators' port.")

    @classmethod
    def _unknown(cls, key: str) -> str:
        homes = [name for name, kind in SECTIONS.items() if key in kind.model_fields]
        if homes and not difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.8):
            return f"unknown key {key!r}; it belongs under " + " or ".join(repr(home) for home in homes)
        return super()._unknown(key)

    @model_validator(mode="after")
    def _rules(self) -> Self:
        from tailrace.cluster.config_rules import problems  # it needs this class

        found = problems(cast(Any, self))
        if found:
            raise ValueError("\n".join(found))
        return self

    def pool(self, role: str) -> Pool:
        """The section of `ctx` or `gen`."""
        return self.ctx if role == "ctx" else self.gen

    def pool_bytes(self, role: str) -> int:
        """kv_bytes of one worker of that pool."""
        own = self.pool(role).kv_bytes
        return self.kv_bytes if own is None else own

    def page_tokens(self, role: str) -> int:
        """tokens_per_page of the workers of that pool."""
        own = self.pool(role).tokens_per_page
        return self.tokens_per_page if own is None else own

    def page_tokens_said(self, role: str) -> int | None:
        """The same, if the operator has said it; None: it follows from the model."""
        said = "tokens_per_page" in self.model_fields_set
        own = self.pool(role).tokens_per_page
        return self.tokens_per_page if own is None and said else own

    def gpus(self, role: str) -> float:
        """GPUs that a worker of that pool asks Ray for."""
        own = self.pool(role).num_gpus
        return (1.0 if self.device == "cuda" else 0.0) if own is None else own

    def page_dtype(self, role: str) -> str:
        """dtype of the workers of that pool."""
        return self.pool(role).dtype or self.dtype


SECTIONS: dict[str, type[Section]] = {
    "ctx": CtxPool, "gen": GenPool, "ingress": IngressPool, "router": RouterPlace, "replay": Replay,
}  # fmt: skip


def _misplaced(key: str) -> str | None:
    if key in TailraceConfig.model_fields:
        return f"unknown key {key!r} here; it belongs at the top level"
    return None


def load_config(data: object) -> TailraceConfig:
    """The configuration, or ConfigError with one line a problem."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration is a {type(data).__name__}, not a mapping of keys to values")
    try:
        return TailraceConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error))) from None


def _lines(error: ValidationError) -> list[str]:
    told: dict[str, list[str]] = {}  # the members of a union each complain: one line for all of them
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        path = ".".join(part for part in parts if "[" not in part and not part.startswith("constrained-"))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] != "value_error":
            secret = "secret" in path or "api_keys" in path
            message = message[:1].lower() + message[1:] + ("" if secret else f", got {item['input']!r}")
        told.setdefault(path, []).append(message)
    lines: list[str] = []
    for path, messages in told.items():
        for part in " or ".join(messages).split("\n"):
            lines.append(f"{path}: {part}" if path else part)
    return lines


def read_args(path: Path) -> dict[str, Any]:
    """Our mapping in a YAML file: `applications[0].args` of a Serve YAML, else the whole file."""
    document = read_yaml(path)
    if "applications" not in document:
        return document
    applications = document["applications"]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: 'applications' must list exactly one application")
    args = applications[0].get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"{path}: applications[0].args is a {type(args).__name__}, not a mapping")
    return args


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that is a mapping; ConfigError names the file and what is wrong with it."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a {type(document).__name__}, not a mapping")
    return document


def load_file(path: Path) -> TailraceConfig:
    """Reads and checks a file; problems are prefixed with its name."""
    try:
        return load_config(read_args(path))
    except ConfigError as error:
        prefix = f"{path}: "
        text = str(error)
        raise ConfigError(
            text if text.startswith(prefix) else "\n".join(prefix + x for x in text.split("\n"))
        ) from None
