"""Case A24 with verify_pages and the shadow check, on real processes: a flipped byte is found and never decoded.

A flip changes a float32 element by a factor of four, so nothing becomes infinite and only a comparison can find it.
The page is one of the last chunk: what flips at ctx while ctx itself still reads it is in its own first token already.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from equal import Model, answer, answers, assert_equal, compare, prompt_of, tiny
from fault_cases import PAGE, Shared, body, hold, in_flight, pool, settings
from harness import LocalCluster, until

CORRUPT = "tailrace_corrupt_pages_total"
PLACES = [("shm", "pool"), ("shm", "unpacked"), ("nixl", "pool"), ("nixl", "staging"), ("nixl", "unpacked")]
FLIP = {"flip_byte": 3, "flip_mask": 1}
PROMPT, LAST = 6 * PAGE, 5  # tokens, and the last page's ordinal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    clusters = Shared(tmp_path_factory.mktemp("clusters"))
    yield clusters
    clusters.close()


def cluster_of(shared: Shared, model: Model, transport: str, **config):
    name = "-".join([transport, *(f"{key}_{value}" for key, value in config.items())])

    def make(path: Path) -> LocalCluster:
        return LocalCluster(
            path, model.spec, max_request_tokens=500, kv_bytes=pool(32), **settings(transport, **config)
        )

    return shared.cluster(name, make)


def ask_with_flip(cluster: LocalCluster, transport: str, where: str, prompt: list[int], max_tokens: int = 8) -> dict:
    """The answer to a prompt of whose last page a byte flips; in ctx's pool before it is read, so that is held."""
    if where == "unpacked":
        cluster.faults("gen-0", flip={"unpacked": LAST}, **FLIP)
    elif where == "staging":
        cluster.faults("ctx-0", flip={"staging": LAST}, **FLIP)
    else:
        return ask_with_flip_in_pool(cluster, transport, prompt, max_tokens)
    return answer(cluster, prompt, max_tokens)


def ask_with_flip_in_pool(cluster: LocalCluster, transport: str, prompt: list[int], max_tokens: int) -> dict:
    cluster.faults("ctx-0", flip={"pool": LAST}, hold_before_page=0, **FLIP)
    hold(cluster, 0, "gen-0")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(answer, cluster, prompt, max_tokens)
        in_flight(cluster)
        until(lambda: cluster.pages("ctx-0", "pinned") >= PROMPT // PAGE, 10, lambda: "not prefilled")
        cluster.settled_metric(CORRUPT)  # by then ctx has summed and flipped
        cluster.poison()
        return waiting.result(30)


@pytest.mark.parametrize(
    ("transport", "where"), [pytest.param(*p, marks=[pytest.mark.soak] * (p[1] == "unpacked")) for p in PLACES]
)
def test_a24_a_flipped_byte_is_found_and_the_answer_is_right(shared, model, transport, where):
    with cluster_of(shared, model, transport, verify_pages=True) as cluster:
        before = cluster.settled_metric(CORRUPT)
        prompt = prompt_of(PROMPT, 300 + PLACES.index((transport, where)))
        choice = ask_with_flip(cluster, transport, where, prompt)
        compare(model, [prompt], [choice], 8).check()
        assert cluster.settled_metric(CORRUPT) - before == (2 if where == "pool" else 1)
        assert_equal(cluster, model, [prompt])  # nothing of it has stayed in a prefix index
        cluster.quiet()


def test_a24_by_policy_fail_a_page_that_stays_wrong_gives_an_error(shared, model):
    with cluster_of(shared, model, "shm", verify_pages=True, transfer_failure_policy="fail") as cluster:
        cluster.faults("gen-0", flip={"unpacked": LAST}, flip_times=2, **FLIP)
        reply = cluster.post("/v1/completions", body(prompt_of(PROMPT, 310)))
        assert reply.status_code >= 500 and reply.json()["error"]["code"] == "corrupt", reply.text


# ------------------------------------------------------------------------------------------------------- shadow check


def checks(cluster: LocalCluster, result: str) -> float:
    return cluster.settled_metric("tailrace_shadow_checks_total", result=result)


def test_the_shadow_check_finds_what_nobody_else_does(shared, model):
    """Without verify_pages it is decoded until the check: what was sent stays sent, the rest is computed anew."""
    with cluster_of(shared, model, "shm", shadow_check_every=1) as cluster:
        before, corrupt = checks(cluster, "different"), cluster.metric(CORRUPT)
        cluster.faults("gen-0", flip={"unpacked": LAST}, **FLIP)
        prompt = prompt_of(PROMPT + 3, 320)
        found = answer(cluster, prompt, 40)["logprobs"]["token_logprobs"]
        assert checks(cluster, "different") - before == 1 and cluster.metric(CORRUPT) == corrupt
        assert len(found) == 40
        assert_equal(cluster, model, [prompt])


@pytest.mark.soak
def test_fifty_right_requests_raise_no_false_alarm(shared, model):
    with cluster_of(shared, model, "shm", shadow_check_every=1) as cluster:
        before = {result: checks(cluster, result) for result in ("equal", "different", "skipped")}
        prompts = [prompt_of(20 + 7 * n % 300, 400 + n) for n in range(50)]
        for low in range(0, 50, 5):
            answers(cluster, prompts[low : low + 5], 12)
        cluster.quiet()
        after = {result: checks(cluster, result) - before[result] for result in before}
        assert after["different"] == 0 and after["equal"] >= 45, after
