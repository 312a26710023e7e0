"""Every field and every rule of the configuration, each with values it takes and values it refuses and why."""

import ast
import json
import re
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from tailrace.cluster.config import (
    SECTIONS,
    TailraceConfig,
    Tenant,
    load_config,
    load_file,
    read_args,
)
from tailrace.cluster.config_rules import LATER
from tailrace.cluster.schema import DOCS_FILE, SCHEMA_FILE, docs_text, json_schema, schema_text
from tailrace.cluster.sizes import derive
from tailrace.model.config import ModelConfig, Rope
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES, FamilyConfig
from tailrace.model.replay_policy import ReplayPolicy
from tests.model.published import V4_FLASH, V32, V41_FLASH, published_config

MANIFESTS = SCHEMA_FILE.parent

# key: (accepted values, refused values with a piece of the reason)
FIELDS = (
    {
        "model": (["smollm2", "/models/llama", "model.gguf"], [("", "at least 1 character"), (3, "valid string")]),
        "model_name": ([None, "my-model"], [("", "at least 1 character"), (1, "valid string")]),
        "dtype": (["bfloat16", "float32"], [("float16", "GPU path"), ("bf16", "bfloat16"), (16, "bfloat16")]),
        "weights": (["dense", "quantized"], [("int4", "dense"), (True, "dense")]),
        "device": (["auto", "cpu", "cuda"], [("gpu", "cuda"), (None, "auto"), (0, "auto")]),
        "max_request_tokens": ([None, 2, 4096], [(1, "greater than or equal to 2"), ("4096", "integer")]),
        "tokens_per_page": ([1, 8, 16, 64, 128], [(0, "greater"), (24, "neither divides"), (16.0, "integer")]),
        "block_tokens": ([16, 64, 256], [(0, "greater"), (40, "neither divides"), (8192, "less than or equal")]),
        "kv_bytes": ([1, 2**30, "1GiB", "1.5 MiB", "100B"], [(0, "greater"), ("1GB", "no size"), (1.5, "integer")]),
        "max_num_tokens": (
            [32, 512],
            [(0, "greater"), (31, "less than max_batch_size"), (10**9, "less than or equal")],
        ),
        "max_batch_size": ([1, 512], [(0, "greater"), (513, "less than max_batch_size (513)")]),
        "capture_batch_sizes": ([None], [([1, 2, 4], "need device: cuda"), ([0], "greater"), ([], "at least 1 item")]),
        "sampling_variants": (
            [None],
            [(["greedy"], "need device: cuda"), (["fast"], "greedy"), ([], "at least 1 item")],
        ),
        "transport": (
            ["auto", "shm", "nixl", "ucx"],
            [
                ("in_process", "test double"),
                ("peer", "needs device: cuda"),
                ("ray", "imply each other"),
                ("tcp", "shm"),
            ],
        ),
        "codec": (["raw", "int8", "fp8", "int4", "lossless", "auto"], [("zip", "raw"), (True, "raw"), (None, "raw")]),
        "codecs_allowed": ([[]], [(["int8"], "by codec 'auto'"), (["raw"], "int8"), ("int8", "tuple")]),
        "verify_pages": ([False, True], [("no", "boolean"), (1, "boolean")]),
        "pin_lease_s": ([1, 30.0], [(0, "greater than 0"), (0.9, "twice heartbeat_s"), (float("inf"), "finite")]),
        "request_lease_s": (
            [1.5, 10],
            [(-1, "greater than 0"), (1.4, "three times heartbeat_s"), (float("nan"), "finite")],
        ),
        "kv_transfer_timeout_s": ([0.5, 10], [(0, "greater than 0"), ("10", "number")]),
        "transceiver_runtime": (["auto", "python"], [("ray", "imply each other"), ("rust", "auto")]),
        "landing_chunks": ([1, 8], [(0, "greater"), (2000, "less than or equal")]),
        "landing_chunk_bytes": ([4096, "4MiB"], [(4095, "greater"), ("4 MB", "no size")]),
        "pairs_per_worker": ([1, 8], [(0, "greater"), (True, "integer")]),
        "peer_sms": ([None, 16, 1024], [(0, "greater"), (1025, "less than or equal"), (1.5, "integer")]),
        "gen_prompt_tail_tokens": (
            [None],
            [(256, "transceiver_runtime: python"), (255, "greater than or equal to 256")],
        ),
        "max_gen_init_admissions_per_pass": ([1, 8], [(0, "greater"), (5000, "less than or equal")]),
        "defer_gen_receives": ([False], [(True, "GPU path"), (1, "boolean")]),
        "enable_client_io_during_gpu_wait": ([False], [(True, "GPU path"), (0, "boolean")]),
        "run_ahead": ([0], [(1, "needs device: cuda"), (2, "less than or equal to 1")]),
        "transfer_failure_policy": (["recompute", "fail"], [("retry", "recompute"), (None, "recompute")]),
        "handoff_mode": (["full", "bounded_replay_on_generation"], [("half", "full"), (None, "full")]),
        "replay": ([{}, {"encoder": None}], [({"encode": 1}, "did you mean 'encoder'"), (None, "dictionary")]),
        "replay.encoder": ([None], [(8, "no meaning with handoff_mode 'full'"), (0, "greater")]),
        "replay.decoder": ([None], [(8, "no meaning with handoff_mode 'full'"), (0, "greater")]),
        "backflow": ([False, True], [("false", "boolean"), (None, "boolean")]),
        "shadow_check_every": ([0, 100], [(-1, "greater than or equal to 0"), (0.5, "integer")]),
        "host_cache_bytes": ([0, "0B"], [("1GiB", "host tier"), (-1, "greater than or equal to 0")]),
        "host_cache_bind_to_gpu_numa_node": ([False], [(True, "GPU path"), (1, "boolean")]),
        "allow_remote_numa_fallback": ([False], [(True, "host_cache_bind_to_gpu_numa_node"), (1, "boolean")]),
        "placement": (
            ["round_robin", "least_tokens", "least_prefill", "prefix"],
            [("random", "round_robin")],
        ),
        "local_prefill_max_tokens": (
            ["auto", 0, 64],
            [(-1, "greater than or equal to 0"), ("never", "auto"), (1.5, "integer")],
        ),
        "local_prefill": (["auto", "never"], [("always", "auto"), (False, "auto")]),
        "decision_log": (["", "placements.jsonl"], [(None, "string"), (1, "string")]),
        "decision_log_bytes": ([65_536, 2**30], [(65_535, "greater"), ("1GiB", "integer")]),
        "retries": ([True, False], [("yes", "boolean"), (1, "boolean")]),
        "tool_parser": (["auto", "hermes", "llama3", "mistral"], [("xml", "hermes"), (1, "hermes")]),
        "prompt_token_cache": ([True, False], [(0, "boolean"), ("yes", "boolean")]),
        "router_wait_s": ([0.1, 5], [(0, "greater than 0"), ("5s", "number")]),
        "max_queued_requests": ([1, 256], [(0, "greater"), (1.0, "integer")]),
        "max_queue_wait_s": ([0.1, 20], [(0, "greater than 0"), ("20s", "number")]),
        "max_worker_deaths_per_request": ([1, 2], [(0, "greater"), (101, "less than or equal")]),
        "max_migrations_in_flight": ([1, 8], [(None, "integer"), (0, "greater")]),
        "breaker_faults": ([1, 5], [(0, "greater"), (1.5, "integer")]),
        "breaker_probe_s": ([0.2, 2], [(0, "greater than 0"), ("2s", "number")]),
        "drain_limit_s": ([1, 30], [(0, "greater than 0"), (100_000, "less than or equal")]),
        "api_keys": (
            [[], ["a-long-key"], ["first-key", "second-key"]],
            [
                (["short"], "shorter than 8"),
                (["same-key", "same-key"], "twice"),
                ("a-long-key", "tuple"),
                ([1], "string"),
            ],
        ),
        "cors_origins": (
            [[], ["*"], ["https://a.example.org", "http://localhost:3000"]],
            [(["a.example.org"], "match"), (["https://a/b"], "match"), ("*", "tuple"), ([1], "string")],
        ),
        "tenants": (
            [{}, {"a": {}}, {"a": {"weight": 4, "rate": 500.0}, "b": {"api_keys": ["key-number-one"]}}],
            [
                ({"a": {"weight": 0}}, "greater than 0"),
                ({"a": {"rate": 0}}, "greater than 0"),
                ({"": {}}, "at least 1 character"),
                ({"a": {"wight": 1}}, "did you mean 'weight'"),
                ({"a": {"api_keys": ["short"]}}, "shorter than 8"),
                ([], "dictionary"),
            ],
        ),
        "header_wait_s": ([0.5, 20], [(0, "greater than 0"), (None, "number")]),
        "slow_reader_s": ([0.5, 30], [(0, "greater than 0"), (True, "number")]),
        "max_active_requests": ([1, 512], [(0, "greater"), ("512", "integer")]),
        "max_body_bytes": ([1024, "16MiB"], [(1023, "greater"), ("1 mib", "no size")]),
        "public_metrics": ([True, False], [("off", "boolean"), (None, "boolean")]),
        "app_name": (
            ["tailrace", "a1_b"],
            [("", "match"), ("Big", "match"), ("a/b", "match"), ("a" * 25, "match"), (1, "string")],
        ),
        "cluster_secret": ([None, "s" * 16], [("s" * 15, "at least 16"), (1234567890123456, "string")]),
        "operators_host": (["0.0.0.0", "127.0.0.1"], [("", "at least 1 character"), (1, "string")]),
        "operators_port": ([0, 8001, 65_535], [(-1, "greater"), (65_536, "less than or equal"), ("8001", "integer")]),
        "ctx": (
            [{}, {"replicas": 2}],
            [({"replica": 2}, "did you mean 'replicas'"), (None, "dictionary"), (2, "dictionary")],
        ),
        "gen": (
            [{}, {"replicas": 2}],
            [({"replica": 2}, "did you mean 'replicas'"), ({"model": "x"}, "belongs at the top level")],
        ),
        "ingress": ([{}, {"replicas": 2}], [({"replikas": 2}, "did you mean 'replicas'"), ([], "dictionary")]),
        "router": ([{}, {"num_cpus": 1}], [({"replicas": 2}, "unknown key 'replicas'"), ("one", "dictionary")]),
        "heartbeat_s": ([0.05, 1], [(0, "greater than 0"), (4, "three times heartbeat_s")]),
        "stats_period_s": ([0.1, 5], [(0, "greater than 0"), ([], "number")]),
        "health_period_s": ([0.1, 5], [(0, "greater than 0"), ("1", "number")]),
        "load_limit_s": ([1, 600], [(0, "greater than 0"), (100_000, "less than or equal")]),
        "compile_limit_s": ([1, 600], [(0, "greater than 0"), (100_000, "less than or equal")]),
        "run_limit_s": ([1, 30], [(0, "greater than 0"), ({}, "number")]),
        "log_level": (["DEBUG", "INFO", "WARNING", "ERROR"], [("debug", "DEBUG"), (10, "DEBUG")]),
        "flight_recorder_bytes": ([0, 2**24], [(-1, "greater than or equal"), ("1 MiB", "integer")]),
        "flight_recorder_dir": (["", "/var/lib/tailrace"], [(3, "string")]),
        "faults": ([False, True], [("true", "boolean"), (1, "boolean")]),
        "gen.drafts": ([0, 1, 16], [(-1, "greater than or equal"), (17, "less than or equal"), (True, "integer")]),
        "ingress.replicas": ([1, 4], [(0, "greater"), ("2", "integer")]),
        "ingress.tokenizer_threads": ([1, 8], [(0, "greater"), (65, "less than or equal")]),
    }
    | {
        key: cases
        for where in ("ctx", "gen", "ingress", "router")
        for key, cases in {
            f"{where}.num_cpus": ([0, 0.1, 2], [(-1, "greater than or equal to 0"), ("1", "number")]),
            f"{where}.resources": (
                [{}, {"ctx": 1}],
                [({"ctx": 0}, "above 0"), ({"": 1}, "not empty"), (["ctx"], "dictionary")],
            ),
            f"{where}.labels": ([{}, {"pool": "ctx"}], [({"pool": 1}, "string"), ("pool=ctx", "dictionary")]),
        }.items()
    }
    | {
        key: cases
        for where in ("ctx", "gen")
        for key, cases in {
            f"{where}.replicas": ([1, 3], [(0, "greater"), (True, "integer"), ("2", "integer")]),
            f"{where}.tp": ([1, 2, 4, 8], [(3, "1, 2, 4 or 8"), (0, "1, 2, 4 or 8")]),
            f"{where}.kv_bytes": ([None, 4096, "512MiB"], [("512 megs", "no size"), (1.5, "integer"), (0, "greater")]),
            f"{where}.threads": ([None, 1, 8], [(0, "greater"), (1.0, "integer")]),
            f"{where}.num_gpus": (
                [None, 0, 0.5, 1],
                [(-0.5, "greater than or equal to 0"), (2, "less than"), ("1", "number")],
            ),
            f"{where}.tokens_per_page": (
                [None, 1, 8, 16, 64, 128],
                [(0, "greater"), (24, f"{where}.tokens_per_page: 24 neither divides")],
            ),
            f"{where}.dtype": ([None, "bfloat16"], [("float32", "into pages of"), ("float16", "bfloat16")]),
        }.items()
    }
)

# rule: (a mapping it takes, a mapping it refuses, a piece of the reason)
RULES = {
    "graphs are a GPU's": (
        {"device": "cuda", "capture_batch_sizes": [1, 2, 32]},
        {"device": "cpu", "capture_batch_sizes": [1, 2, 32]},
        "capture_batch_sizes: CUDA graphs need device: cuda, said explicitly; it is 'cpu'",
    ),
    "variants are those of graphs": (
        {"device": "cuda", "sampling_variants": ["greedy", "temperature_only"]},
        {"device": "auto", "sampling_variants": ["greedy", "temperature_only"]},
        "sampling_variants: CUDA graphs need device: cuda, said explicitly; it is 'auto'",
    ),
    "passes run ahead on a GPU": (
        {"device": "cuda", "run_ahead": 1},
        {"device": "cpu", "run_ahead": 1},
        "run_ahead: 1 needs device: cuda, said explicitly; it is 'cpu'",
    ),
    "shadow checks compute between passes": (
        {"device": "cuda", "shadow_check_every": 5},
        {"device": "cuda", "shadow_check_every": 5, "run_ahead": 1},
        "run_ahead: 1 leaves no pause between passes",
    ),
    "a captured batch may occur": (
        {"device": "cuda", "max_batch_size": 8, "capture_batch_sizes": [8]},
        {"device": "cuda", "max_batch_size": 8, "capture_batch_sizes": [8, 9]},
        "capture_batch_sizes: 9 is over max_batch_size (8)",
    ),
    "packed weights are a CPU's": (
        {"device": "auto", "weights": "quantized"},
        {"device": "cuda", "weights": "quantized"},
        "weights: 'quantized' is a product of CPUs: use dense (device is 'cuda')",
    ),
    "a GPU worker has one rank": (
        {"device": "auto", "gen": {"tp": 2}},
        {"device": "cuda", "gen": {"tp": 2}},
        "gen.tp: 2 ranks on GPUs are not in this release",
    ),
    "a GPU's pages are not in shared memory": (
        {"device": "cuda", "transport": "auto"},
        {"device": "cuda", "transport": "shm"},
        "transport: 'shm' moves pages that stand in host memory: use auto",
    ),
    "peer reads GPUs' memory": (
        {"device": "cuda", "transport": "peer"},
        {"device": "auto", "transport": "peer"},
        "transport: 'peer' reads pages on a GPU and needs device: cuda, said explicitly; it is 'auto'",
    ),
    "programs are a GPU's": (
        {"device": "auto", "peer_sms": 16},
        {"device": "cpu", "peer_sms": 16},
        "peer_sms: 16 programs of a GPU, and device is 'cpu'",
    ),
    "pages on GPUs are alike": (
        {"device": "auto", "gen": {"tokens_per_page": 32}},
        {"device": "cuda", "gen": {"tokens_per_page": 32}},
        "gen.tokens_per_page: 32 and 16 (ctx), and pages on GPUs are read as they are (device is 'cuda')",
    ),
    "numbers on GPUs are alike": (
        {"device": "auto", "codec": "int8", "gen": {"dtype": "float32"}},
        {"device": "cuda", "codec": "int8", "gen": {"dtype": "float32"}},
        "gen.dtype: 'float32' and 'bfloat16' (ctx), and pages on GPUs are read as they are (device is 'cuda')",
    ),
    "nothing flows back from a GPU": (
        {"device": "auto", "backflow": True},
        {"device": "cuda", "backflow": True},
        "backflow: ctx reads pages of gens that stand in host memory",
    ),
    "sums are taken in host memory": (
        {"device": "auto", "verify_pages": True},
        {"device": "cuda", "verify_pages": True},
        "verify_pages: sums are taken of pages that stand in host memory",
    ),
    "packed weights are not split": (
        {"weights": "quantized", "ctx": {"tp": 2}},
        {"weights": "quantized", "gen": {"tp": 2}},
        "weights: quantized weights are not split over ranks, and gen.tp is 2",
    ),
    "back-flow reads shared memory": (
        {"backflow": True, "transport": "shm"},
        {"backflow": True, "transport": "nixl"},
        "backflow: ctx reads gens over shared memory only",
    ),
    "back-flow brings what ctx would compute": (
        {"weights": "quantized"},
        {"backflow": True, "weights": "quantized"},
        "backflow: gens decode on quantized weights",
    ),
    "back-flow brings pages of ctx's dtype": (
        {"gen": {"dtype": "float32"}, "codec": "int8"},
        {"gen": {"dtype": "float32"}, "codec": "int8", "backflow": True},
        "backflow: pages of float32 (gen) do not become pages of bfloat16",
    ),
    "a page divides the block": (
        {"tokens_per_page": 32},
        {"tokens_per_page": 48},
        "tokens_per_page: 48 neither divides",
    ),
    "another dtype needs a codec": (
        {"gen": {"dtype": "float32"}, "codec": "int8"},
        {"gen": {"dtype": "float32"}},
        "codec: 'raw' brings no pages of bfloat16 (ctx) into pages of float32 (gen)",
    ),
    "or is a multiple of it": ({"tokens_per_page": 128}, {"tokens_per_page": 96}, "nor is a multiple"),
    "a full batch fits in a pass": (
        {"max_num_tokens": 8, "max_batch_size": 8},
        {"max_num_tokens": 8, "max_batch_size": 9},
        "max_num_tokens: 8 is less than max_batch_size (9)",
    ),
    "transport ray implies the ray runtime": (
        {"transport": "shm", "transceiver_runtime": "python"},
        {"transport": "ray", "transceiver_runtime": "python"},
        "imply each other",
    ),
    "the ray runtime implies transport ray": (
        {"transport": "auto"},
        {"transceiver_runtime": "ray"},
        "imply each other",
    ),
    "ray moves no encoded pages": (
        {"transceiver_runtime": "ray", "transport": "ray"},
        {"transceiver_runtime": "ray", "transport": "ray", "codec": "int8"},
        "codec: 'int8' is unsupported with transport ray",
    ),
    "ray moves pages of one rank": (
        {"transceiver_runtime": "ray", "transport": "ray", "ctx": {"tp": 1}},
        {"transceiver_runtime": "ray", "transport": "ray", "ctx": {"tp": 2}},
        "ctx.tp: 2 is unsupported with transport ray",
    ),
    "ray moves pages as they are": (
        {"transceiver_runtime": "ray", "transport": "ray", "gen": {"tokens_per_page": 16}},
        {"transceiver_runtime": "ray", "transport": "ray", "gen": {"tokens_per_page": 32}},
        "gen.tokens_per_page: 32 and 16 (ctx) are unsupported with transport ray",
    ),
    "ray carries no prompt tail": (
        {"transceiver_runtime": "ray", "transport": "ray"},
        {"transceiver_runtime": "ray", "transport": "ray", "gen_prompt_tail_tokens": 256},
        "said explicitly; it is 'ray'",
    ),
    "ray brings nothing back": (
        {"transceiver_runtime": "ray", "transport": "ray", "backflow": False},
        {"transceiver_runtime": "ray", "transport": "ray", "backflow": True},
        "backflow: True is unsupported with transport ray",
    ),
    "a prompt tail needs the python runtime by name": (
        {"gen_prompt_tail_tokens": 256, "transceiver_runtime": "python"},
        {"gen_prompt_tail_tokens": 256, "transceiver_runtime": "auto"},
        "said explicitly; it is 'auto'",
    ),
    "a prompt tail covers a block": (
        {"gen_prompt_tail_tokens": 512, "transceiver_runtime": "python", "block_tokens": 512},
        {"gen_prompt_tail_tokens": 256, "transceiver_runtime": "python", "block_tokens": 512},
        "gen_prompt_tail_tokens: 256 is less than block_tokens (512)",
    ),
    "what is replayed belongs to its mode": (
        {"handoff_mode": "bounded_replay_on_generation", "replay": {"decoder": 256}},
        {"replay": {"decoder": 256}},
        "replay.decoder: 256 has no meaning with handoff_mode 'full'",
    ),
    "the lower layers see no fewer tokens": (
        {"handoff_mode": "bounded_replay_on_generation", "replay": {"decoder": 256, "encoder": 300}},
        {"handoff_mode": "bounded_replay_on_generation", "replay": {"decoder": 256, "encoder": 255}},
        "replay.encoder: 255 is less than replay.decoder (256)",
    ),
    "a prompt tail covers what is replayed and looked back at": (
        {
            "handoff_mode": "bounded_replay_on_generation",
            "replay": {"decoder": 256},
            "transceiver_runtime": "python",
            "gen_prompt_tail_tokens": 259,
        },
        {
            "handoff_mode": "bounded_replay_on_generation",
            "replay": {"decoder": 256},
            "transceiver_runtime": "python",
            "gen_prompt_tail_tokens": 258,
        },
        "gen_prompt_tail_tokens: 258 is less than 259: the 256 tokens that gen replays",
    ),
    "never prefilling locally has no threshold": (
        {"local_prefill": "never", "local_prefill_max_tokens": 0},
        {"local_prefill": "never", "local_prefill_max_tokens": 64},
        "'never' forbids it",
    ),
    "a request lease outlives a late heartbeat": (
        {"heartbeat_s": 1, "request_lease_s": 3},
        {"heartbeat_s": 1, "request_lease_s": 2},
        "three times heartbeat_s",
    ),
    "a pin lease outlives a late heartbeat": (
        {"heartbeat_s": 1, "pin_lease_s": 2},
        {"heartbeat_s": 1, "pin_lease_s": 1},
        "twice heartbeat_s",
    ),
    "lossy codecs are allowed for auto to choose": (
        {"codec": "auto", "codecs_allowed": ["int8", "int4"]},
        {"codec": "int8", "codecs_allowed": ["int4"]},
        "codecs_allowed: int4 may be chosen by codec 'auto', and codec is 'int8'",
    ),
    "an allowed codec stands there once": (
        {"codec": "auto", "codecs_allowed": ["int8"]},
        {"codec": "auto", "codecs_allowed": ["int8", "int8"]},
        "twice",
    ),
    "numa fallback only beside binding": ({}, {"allow_remote_numa_fallback": True}, "only has a meaning beside"),
    "keys are told apart": (
        {"api_keys": ["key-number-one", "key-number-two"]},
        {"api_keys": ["key-number-one"] * 2},
        "twice",
    ),
    "a key belongs to one tenant": (
        {"tenants": {"a": {"api_keys": ["key-number-one"]}, "b": {"api_keys": ["key-number-two"]}}},
        {"tenants": {"a": {"api_keys": ["key-number-one"]}, "b": {"api_keys": ["key-number-one"]}}},
        "tenants.b.api_keys: a key stands elsewhere too",
    ),
    "a decode-only option is refused under ctx": (
        {"max_gen_init_admissions_per_pass": 2},
        {"ctx": {"max_gen_init_admissions_per_pass": 2}},
        "ctx: key 'max_gen_init_admissions_per_pass' is a decode-only option",
    ),
    "a pool's key at the top level is sent home": ({"ctx": {"replicas": 2}}, {"replicas": 2}, "belongs under 'ctx'"),
    "a top-level key in a pool is sent home": ({"codec": "raw"}, {"gen": {"codec": "raw"}}, "belongs at the top level"),
}


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def field_names(kind: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in kind.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += field_names(field.annotation, f"{prefix}{name}.")
    return names


ACCEPTED = [(key, value) for key, (good, _) in FIELDS.items() for value in good]
REFUSED = [(key, value, reason) for key, (_, bad) in FIELDS.items() for value, reason in bad]


def test_every_field_stands_in_the_table_with_accepted_and_refused_values():
    assert sorted(FIELDS) == sorted(field_names(TailraceConfig))
    assert all(good and bad for good, bad in FIELDS.values())


@pytest.mark.parametrize(("key", "value"), ACCEPTED, ids=lambda v: str(v)[:40])
def test_a_good_value_is_taken(key, value):
    config = load_config(nested(key, value))
    kept = config
    for part in key.split("."):
        kept = getattr(kept, part)
    if isinstance(value, int | float | bool) and not isinstance(kept, BaseModel):
        assert kept == value


@pytest.mark.parametrize(("key", "value", "reason"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_bad_value_is_refused_by_key_and_reason(key, value, reason):
    with pytest.raises(ConfigError) as caught:
        load_config(nested(key, value))
    message = str(caught.value)
    assert reason in message
    assert key.split(".")[0] in message


@pytest.mark.parametrize("name", RULES)
def test_a_rule_between_fields_takes_one_side_and_refuses_the_other(name):
    good, bad, reason = RULES[name]
    load_config(good)
    with pytest.raises(ConfigError) as caught:
        load_config(bad)
    assert reason in str(caught.value)


@pytest.mark.parametrize("rule", LATER, ids=lambda r: f"{r.path}: {r.reason[:30]}")
def test_every_value_that_waits_for_a_later_release_has_an_example(rule):
    examples = [nested(key, value) for key, value, _ in REFUSED if key == rule.path]
    examples += [bad for _, bad, _ in RULES.values()]
    said = []
    for example in examples:
        with pytest.raises(ConfigError) as caught:
            load_config(example)
        said.append(str(caught.value))
    # transport: ray alone is refused for its mismatch first; alone it never reaches its own reason
    wanted = "imply each other" if rule.reason.startswith("is the benchmarks' baseline") else rule.reason
    assert any(rule.path in text and wanted in text for text in said)


@pytest.mark.parametrize(
    ("data", "suggestion"),
    [
        ({"kv_byte": 1}, "'kv_bytes'"),
        ({"tokens_per_pag": 16}, "'tokens_per_page'"),
        ({"ctx": {"thread": 1}}, "'threads'"),
        ({"gen": {"label": {}}}, "'labels'"),
        ({"ingress": {"tokeniser_threads": 1}}, "'tokenizer_threads'"),
        ({"router": {"num_cpu": 1}}, "'num_cpus'"),
        ({"replay": {"decode": 1}}, "'decoder'"),
        ({"tenants": {"a": {"rat": 1}}}, "'rate'"),
    ],
)
def test_an_unknown_key_at_any_level_is_refused_with_the_nearest_known_one(data, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean {suggestion}"):
        load_config(data)


def test_a_word_that_is_near_nothing_gets_no_suggestion():
    with pytest.raises(ConfigError) as caught:
        load_config({"zzzzqqqq": 1})
    assert str(caught.value) == "unknown key 'zzzzqqqq'"


def test_workers_on_gpus_ask_for_one_each_unless_told():
    assert [load_config({"device": d}).gpus("ctx") for d in ("auto", "cpu", "cuda")] == [0, 0, 1]
    shared = load_config({"device": "cuda", "gen": {"num_gpus": 0.5}, "ctx": {"num_gpus": 0}})
    assert (shared.gpus("gen"), shared.gpus("ctx")) == (0.5, 0)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config({"run_ahead": 1, "host_cache_bytes": 4096, "tokens_per_page": 24})
    assert len(str(caught.value).split("\n")) == 3


def test_a_tenant_obeys_the_same_bounds():
    Tenant.model_validate({"weight": 2.0, "rate": 5})
    for bad in ({"weight": 0}, {"rate": -1}, {"weight": "1"}, {"rats": 1}):
        with pytest.raises(ValidationError):
            Tenant.model_validate(bad)


def test_a_config_cannot_be_changed():
    config = load_config({})
    with pytest.raises(ValidationError):
        config.ctx.replicas = 2


def test_secrets_are_not_shown():
    config = load_config({"cluster_secret": "very-secret-words", "api_keys": ["secret-key-1"]})
    assert "very-secret" not in repr(config)
    assert "secret-key" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        load_config({"cluster_secret": "too-short"})
    assert "too-short" not in str(caught.value)


@pytest.mark.parametrize("data", [[], "model: x", 3])
def test_what_is_no_mapping_is_refused(data):
    with pytest.raises(ConfigError, match="not a mapping"):
        load_config(data)


def test_the_checked_in_schema_and_docs_are_the_generated_ones():
    assert SCHEMA_FILE.read_text() == schema_text(), "run make schema"
    assert DOCS_FILE.read_text() == docs_text(), "run make schema"


def test_the_schema_takes_the_accepted_values_and_refuses_unknown_keys():
    validator = jsonschema.Draft202012Validator(json_schema())
    for key, value in ACCEPTED:
        assert not list(validator.iter_errors(nested(key, value))), key
    for key in ("kv_byte", "ctx.replica", "gen.x", "ingress.x", "router.replicas", "replay.x"):
        assert list(validator.iter_errors(nested(key, 1))), key


def test_the_schema_refuses_what_is_out_of_bounds():
    validator = jsonschema.Draft202012Validator(json_schema())
    bounded = [(k, v) for k, v, why in REFUSED if "greater" in why or "less than or equal" in why]
    assert len(bounded) > 40
    for key, value in bounded:
        assert list(validator.iter_errors(json.loads(json.dumps(nested(key, value))))), (key, value)


def test_every_level_of_the_schema_is_closed():
    schema = json_schema()
    for name, part in {"top": schema, **schema["$defs"]}.items():
        assert part["additionalProperties"] is False, name
    assert set(schema["$defs"]) == {kind.__name__ for kind in SECTIONS.values()} | {"Tenant"}


def test_every_field_has_a_docs_line_and_a_status():
    for kind in (TailraceConfig, Tenant, *SECTIONS.values()):
        for name, field in kind.model_fields.items():
            assert field.description and field.description.endswith("."), name
            assert field.json_schema_extra["x-status"] in ("stable", "prototype"), name


def test_the_full_manifest_shows_every_key():
    def keys(data: dict, prefix: str = "") -> list[str]:
        found = []
        for key, value in data.items():
            found.append(prefix + key)
            if isinstance(value, dict) and prefix + key in SECTIONS:
                found += keys(value, f"{prefix}{key}.")
        return found

    assert sorted(keys(read_args(MANIFESTS / "serve/full.yaml"))) == sorted(field_names(TailraceConfig))


def test_a_files_problems_carry_its_name(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("applications:\n- args: {kv_byte: 1}\n")
    with pytest.raises(ConfigError, match=r"bad.yaml: unknown key 'kv_byte'"):
        load_file(file)
    file.write_text("applications: []\n")
    with pytest.raises(ConfigError, match="exactly one application"):
        load_file(file)
    file.write_text("a: [\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_file(file)
    with pytest.raises(ConfigError, match="No such file"):
        load_file(tmp_path / "absent.yaml")


MODEL = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope=Rope(),
    windows=(None, None),
)
PAGE = 2 * 2 * 2 * 8 * 16 * 4  # layers, fields, heads, dim, tokens, float32


def test_sizes_follow_from_the_config_and_the_model():
    sizes = derive(load_config({"dtype": "float32", "kv_bytes": 33 * PAGE, "gen": {"kv_bytes": 17 * PAGE + 5}}), MODEL)
    assert (sizes.layout("ctx").bytes_per_page, sizes.ctx_pages, sizes.gen_pages) == (PAGE, 33, 17)
    assert sizes.max_request_tokens == 16 * 16


def test_the_pool_of_a_worker_is_divided_among_its_ranks():
    config = {"dtype": "float32", "kv_bytes": 33 * PAGE, "ctx": {"tp": 2}, "gen": {"tp": 4}}
    sizes = derive(load_config(config), MODEL)
    assert sizes.layout("gen").bytes_per_page == PAGE
    assert sizes.rank_layout("ctx").bytes_per_page == PAGE // 2 and sizes.ctx_pages == 33
    assert sizes.rank_layout("gen").bytes_per_page == PAGE // 2 and sizes.gen_pages == 16  # each head is held twice


def test_pools_may_differ_in_tokens_a_page_and_dtype():
    pools = {"ctx": {"tokens_per_page": 8}, "gen": {"tokens_per_page": 64, "dtype": "bfloat16"}}
    sizes = derive(load_config({"dtype": "float32", "codec": "int8", "kv_bytes": 33 * PAGE} | pools), MODEL)
    assert (sizes.layout("ctx").bytes_per_page, sizes.layout("gen").bytes_per_page) == (PAGE // 2, 2 * PAGE)
    assert (sizes.ctx_pages, sizes.gen_pages) == (66, 16)
    assert sizes.max_request_tokens == 65 * 8  # the smaller of 65 pages of 8 and 15 of 64


def test_the_longest_request_is_bounded_by_the_models_positions():
    assert derive(load_config({"dtype": "float32", "kv_bytes": 1000 * PAGE}), MODEL).max_request_tokens == 1024


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            {"kv_bytes": 4 * PAGE},
            "kv_bytes: 16384 bytes are 4 pages of 4096 bytes; a scratch page and one block need 5",
        ),
        ({"gen": {"kv_bytes": 4 * PAGE}}, "gen.kv_bytes"),
        ({"gen": {"tp": 4, "kv_bytes": 9 * PAGE}}, "gen.kv_bytes: 36864 bytes are 4 pages of 8192 bytes"),
        ({"ctx": {"tp": 8}}, "ctx.tp: 8 ranks cannot share 4 attention heads"),
        ({"max_request_tokens": 1025}, "1025 is over the model's 1024 positions"),
        ({"max_request_tokens": 257, "ctx": {"kv_bytes": 17 * PAGE}}, "ctx.kv_bytes: 69632 bytes hold 256 tokens"),
    ],
)
def test_sizes_that_cannot_hold_a_request_are_refused(data, reason):
    with pytest.raises(ConfigError) as caught:
        derive(load_config({"dtype": "float32"} | data), MODEL)
    assert reason in str(caught.value)


def family(name: str) -> FamilyConfig:
    raw = published_config(name)
    return FAMILIES[raw["model_type"]].parse(raw, "config.json")


@pytest.mark.parametrize(
    ("name", "page_bytes", "token_bytes"),
    [(V41_FLASH, 113_920, 890), (V4_FLASH, 449_824, 3_514), (V32, 128 * 48_068, 48_068)],
)
def test_pages_of_a_family_with_rows_of_its_own_take_128_tokens_unless_told(name, page_bytes, token_bytes):
    sizes = derive(load_config({"kv_bytes": "2GiB", "max_request_tokens": 16_384}), family(name))
    layout = sizes.layout("gen")
    assert (layout.tokens_per_page, layout.bytes_per_page) == (128, page_bytes)
    assert layout.bytes_per_page // layout.tokens_per_page == token_bytes
    assert sizes.gen_pages == 2**31 // page_bytes and sizes.rank_layout("ctx") == layout
    assert layout.history_pages(32 << 10) == 256, "descriptors of a prompt of 32k tokens"
    assert derive(load_config({"kv_bytes": "8GiB", "tokens_per_page": 256}), family(name)).gen_pages > 100


def test_state_pages_are_left_out_of_what_a_pool_holds_for_one_request():
    config = load_config({"kv_bytes": 40 * 113_920})
    layout = derive(config, family(V41_FLASH)).layout("ctx")
    assert derive(config, family(V41_FLASH)).max_request_tokens == (40 - 1 - layout.num_state_pages) * 128


@pytest.mark.parametrize(
    ("data", "reasons"),
    [
        ({"tokens_per_page": 16}, ["tokens_per_page is 16", "multiple of 128", "csa_hca"]),
        ({"block_tokens": 48}, ["block_tokens: 48", "128 tokens a page"]),
        ({"codec": "int8"}, ["codec: 'int8'", "formats of their own"]),
        ({"codec": "auto"}, ["codec: 'auto'"]),
        ({"ctx": {"tp": 2}}, ["ctx.tp: 2"]),
        ({"backflow": True, "shadow_check_every": 3}, ["backflow: True", "shadow_check_every: 3"]),
        ({"weights": "quantized"}, ["weights: 'quantized'"]),
        ({"gen": {"tokens_per_page": 256}}, ["gen.tokens_per_page: 256 and unset (ctx)"]),
        ({"ctx": {"tokens_per_page": 128}, "gen": {"tokens_per_page": 256}}, ["256 and 128 (ctx)"]),
        ({"gen": {"dtype": "float32"}, "codec": "int8"}, ["gen.dtype: float32 and bfloat16 (ctx)"]),
        ({"kv_bytes": 10 * 449_824}, ["kv_bytes", "10 pages of 449824 bytes", "need"]),
    ],
)
def test_what_rows_of_their_own_cannot_do_is_refused_with_the_numbers(data, reasons):
    with pytest.raises(ConfigError) as caught:
        derive(load_config(data), family(V4_FLASH))
    for reason in reasons:
        assert reason in str(caught.value), caught.value


def test_every_stable_field_is_used_by_the_composition():
    """A key that nobody reads would be a promise that nobody keeps."""
    read = set()
    for path in (MANIFESTS.parent / "cluster").glob("*.py"):
        if path.name not in ("config.py", "config_rules.py", "schema.py"):
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    stable = {
        name
        for kind in (TailraceConfig, *SECTIONS.values())
        for name, field in kind.model_fields.items()
        if field.json_schema_extra["x-status"] == "stable"
    }
    only_rules = {"transceiver_runtime"}  # it follows from transport
    assert stable - read == only_rules


REPLAYS = {"handoff_mode": "bounded_replay_on_generation", "kv_bytes": "2GiB"}


def test_a_replay_is_of_two_windows_unless_said_otherwise_and_exact_from_a_number_on():
    assert derive(load_config({"kv_bytes": "2GiB"}), family(V41_FLASH)).replay is None
    sizes = derive(load_config(REPLAYS), family(V41_FLASH))
    assert (sizes.replay, sizes.replay_step) == (ReplayPolicy(256, 256), "replay-256")
    for said, policy, step in (
        ({"decoder": 140}, ReplayPolicy(140, 140), "replay-140"),
        ({"decoder": 128, "encoder": 500}, ReplayPolicy(128, 500), "replay-128"),
        ({"decoder": 2541}, ReplayPolicy(2541, 2541), ""),
    ):
        sizes = derive(load_config(REPLAYS | {"replay": said}), family(V41_FLASH))
        assert (sizes.replay, sizes.replay_step) == (policy, step)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (V4_FLASH, {}, "handoff_mode: bounded_replay_on_generation needs a model whose upper layers"),
        (V41_FLASH, {"replay": {"decoder": 127}}, "replay: decoder is 127 tokens, fewer than a window of 128"),
        (V41_FLASH, {"replay": {"encoder": 200}}, "decoder is 256 and encoder 200"),
        (
            V41_FLASH, {"gen_prompt_tail_tokens": 258, "transceiver_runtime": "python"},
            "gen_prompt_tail_tokens: 258 is less than 259",
        ),
    ],
)  # fmt: skip
def test_a_replay_that_a_model_cannot_do_is_refused_with_the_numbers(model, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        derive(load_config(REPLAYS | more), family(model))


def test_a_model_of_plain_pages_replays_nothing():
    with pytest.raises(ConfigError, match="handoff_mode: .* family llama is none: use full"):
        derive(load_config(REPLAYS), MODEL)
