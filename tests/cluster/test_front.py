"""How the configuration becomes the settings of router and ingress."""

import os

import pytest

from tailrace.cluster import front
from tailrace.cluster.config import load_config
from tailrace.cluster.front import ingress_config, router_settings, token_cache
from tailrace.model.source import open_source


def test_the_routers_settings_follow_the_configuration():
    config = load_config(
        {
            "placement": "round_robin", "local_prefill": "never", "local_prefill_max_tokens": 0, "pairs_per_worker": 3,
            "max_queued_requests": 7, "max_worker_deaths_per_request": 4, "request_lease_s": 6, "heartbeat_s": 1,
            "ctx": {"replicas": 2}, "gen": {"replicas": 3},
        }
    )  # fmt: skip
    settings = router_settings(config)
    assert settings.placement == "round_robin" and settings.local_prefill == "never"
    assert (settings.local_prefill_max_tokens, settings.pairs_per_worker, settings.max_waiting) == (0, 3, 7)
    assert (settings.max_worker_deaths_per_request, settings.request_lease_s, settings.heartbeat_s) == (4, 6, 1)
    assert (settings.ctx_replicas, settings.gen_replicas) == (2, 3)


def test_an_automatic_threshold_is_left_to_the_router():
    assert router_settings(load_config({})).local_prefill_max_tokens is None
    assert router_settings(load_config({"local_prefill_max_tokens": 64})).local_prefill_max_tokens == 64


def test_the_ingress_settings_follow_the_configuration_and_the_model():
    source = open_source("smollm2")
    config = load_config(
        {
            "model_name": "served", "api_keys": ["key-number-one"], "max_active_requests": 5, "max_body_bytes": "1MiB",
            "header_wait_s": 3, "slow_reader_s": 4, "retries": False, "max_request_tokens": 100, "router_wait_s": 2,
            "public_metrics": False, "cors_origins": ["https://a.example.org"], "ingress": {"tokenizer_threads": 3},
        }
    )  # fmt: skip
    made = ingress_config(config, source, "ingress-7")
    assert (made.process, made.model_name, made.revision) == ("ingress-7", "served", source.revision)
    assert (made.vocab_size, made.max_request_tokens) == (source.config.vocab_size, 100)
    assert made.api_keys == {"key-number-one": ""} and made.fidelity == "bfloat16/exact"
    assert (made.max_active_requests, made.max_body_bytes, made.tokenizer_threads) == (5, 2**20, 3)
    assert (made.header_wait_s, made.slow_reader_s, made.public_metrics) == (3, 4, False)
    assert (made.policy.retries, made.policy.router_wait_s) == (False, 2)
    assert made.cors_origins == ("https://a.example.org",)


def test_an_unnamed_model_is_served_under_its_sources_name():
    assert ingress_config(load_config({}), open_source("smollm2"), "i").model_name == "smollm2"


def test_the_prompt_token_cache_is_there_unless_switched_off_and_shared_where_there_are_several_ingresses():
    source = open_source("smollm2")
    assert token_cache(load_config({"prompt_token_cache": False}), source) is None
    alone = token_cache(load_config({}), source)
    assert alone is not None and alone._store is None
    several = load_config({"app_name": "tfront", "ingress": {"replicas": 2}})
    first, second = token_cache(several, source), token_cache(several, source)
    assert first is not None and second is not None
    text = "The miller opened the gate and counted the turns. " * 100
    assert first.encode(text, special=False) == second.encode(text, special=False)
    assert second.counts.store_tokens > 0 and second.counts.fresh_tokens == 0
    for cache in (first, second):
        cache.close()


@pytest.mark.parametrize(("cores", "threads", "parallel"), [(1, "1", "false"), (2, "1", "false"), (4, "3", None)])
def test_the_tokenizers_library_leaves_a_core_and_takes_no_thread_where_it_would_be_one(
    monkeypatch, cores, threads, parallel
):
    names = ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    for name in names:
        monkeypatch.setenv(name, "unset")  # so that what is set below goes again
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    front._leave_a_core()
    assert [os.environ.get(name) for name in names] == [threads, parallel]
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    front._leave_a_core()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true", "what the operator has set stands"
