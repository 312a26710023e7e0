"""Cases A and B of the field: preempted and slow prefills, aborts in each state, request ids, gens that are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from equal import Model, answer, answers, assert_equal, compare, prompt_of, tiny
from fault_cases import (
    CHUNK,
    NIXL_FIRST,
    PAGE,
    Asked,
    Shared,
    back_at_its_port,
    body,
    canary,
    hold,
    idle_latency,
    in_flight,
    pool,
    prefilled,
    router_sees,
    settings,
)
from harness import LocalCluster, until

from tailrace.transfer.request_state import TERMINAL, State

POOL = 32  # pages of each worker
both = pytest.mark.parametrize("transport", NIXL_FIRST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    clusters = Shared(tmp_path_factory.mktemp("clusters"))
    yield clusters
    clusters.close()


def two_gens(shared: Shared, model: Model, transport: str) -> AbstractContextManager[LocalCluster]:
    """1P2D with pools of 32 pages; prefill chunks and landing chunks of 4 pages."""

    def make(path: Path) -> LocalCluster:
        config = settings(transport, kv_bytes=pool(POOL), max_request_tokens=500, local_prefill="never")
        config |= {"pin_lease_s": 3.0, "request_lease_s": 3.0, "kv_transfer_timeout_s": 20.0}
        return LocalCluster(path, model.spec, gen=2, **config)

    return shared.cluster(f"two-gens-{transport}-", make)


# ------------------------------------------------------------------------------------------------------- prefills


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_a3_a_prefill_preempted_in_its_last_step_is_computed_again_and_nothing_empty_is_handed_over(
    shared, model, transport
):
    with two_gens(shared, model, transport) as cluster:
        idle = idle_latency(cluster)
        before = cluster.settled_metric("tailrace_preemptions_total", role="ctx")
        cluster.faults("ctx-0", preempt=4)
        assert_equal(cluster, model, [prompt_of(n, 10 + n) for n in (5, PAGE, CHUNK + 7)])
        assert cluster.settled_metric("tailrace_preemptions_total", role="ctx") - before == 4
        assert cluster.metric("tailrace_prompt_positions_total", role="gen") == 0
        canary(cluster, model, idle, 1)


def test_a24_an_error_of_a_slow_prefill_is_the_clients_and_no_token_comes(model, tmp_path):
    """ "P returns an error after 1 s": without retries that is a 5xx with a type, also for a stream."""
    with LocalCluster(tmp_path, model.spec, retries=False, **settings("auto")) as cluster:
        for stream in (False, True):
            cluster.faults("ctx-0", preempt=1, slow_pass_s=1.0)
            started = time.monotonic()
            reply = cluster.post("/v1/completions", body(prompt_of(20, 30 + stream), stream=stream))
            assert 1 <= time.monotonic() - started < 3
            assert reply.status_code >= 500 and "choices" not in reply.text, reply.text
            assert reply.json()["error"]["code"] == "out_of_pages", reply.text
        cluster.faults("ctx-0")
        assert_equal(cluster, model, [prompt_of(20, s) for s in (30, 31, 32)])
        cluster.quiet(3)


@both
def test_a10_a_token_in_any_chunk_of_a_slow_prefill_decides_the_answer_alike(shared, model, transport):
    """6 chunks, slow to compute and quick to send; the token that differs stands in chunk 1, 3 and 6 in turn."""
    with two_gens(shared, model, transport) as cluster:
        cluster.faults("ctx-0", slow_pass_s=0.05)
        told, prompt = [], prompt_of(6 * CHUNK - 3, 40)
        for chunk in (1, 3, 6):
            at = chunk * CHUNK - 20
            for token in (prompt[at], 4 + (prompt[at] + 100) % 500):
                asked = [*prompt[:at], token, *prompt[at + 1 :]]
                [choice] = assert_equal(cluster, model, [asked], cache_salt=f"{transport} {chunk} {token}")
                told.append(choice["logprobs"]["token_logprobs"])
        assert told[0] == told[2] == told[4], "the same prompt"
        assert len({tuple(logprobs) for logprobs in told}) == 4, "a token that decides nothing"


# --------------------------------------------------------------------------------------------------------- aborts


Reached = Callable[[Asked], None]  # waits until the request is in the state


def _queued(cluster: LocalCluster) -> Reached:
    """Two prompts that are held take what the gens have."""
    hold(cluster, 1)
    others = [Asked(cluster, prompt_of(25 * PAGE, s)) for s in (50, 51)]
    in_flight(cluster, 2)

    def reached(asked: Asked) -> None:
        until(lambda: cluster.info()["queue"]["length"] == 1, 10, lambda: f"{cluster.info()['queue']}")
        for other in others:
            other.leave()

    return reached


def _at_ctx(cluster: LocalCluster, counted: str) -> Reached:
    """At a slow ctx, behind others or not."""
    cluster.faults("ctx-0", slow_pass_s=0.4)
    others = [Asked(cluster, prompt_of(2 * CHUNK, s)) for s in (52, 53)] if counted == "queued" else []
    if others:
        until(lambda: cluster.workers()["ctx-0"]["running"] > 0, 10, lambda: "nothing runs")

    def reached(asked: Asked) -> None:
        until(lambda: cluster.workers()["ctx-0"][counted] > 0, 10, lambda: f"{cluster.workers()['ctx-0']}")
        for other in others:
            other.leave()

    return reached


def _unbound(cluster: LocalCluster) -> Reached:
    """The gens are stopped and take nothing."""
    cluster.stop("gen-0"), cluster.stop("gen-1")
    return lambda asked: router_sees(cluster, "prefilled_unbound")


def _reading(cluster: LocalCluster) -> Reached:
    hold(cluster, 2)
    return lambda asked: router_sees(cluster, "reading")


def _releasing(cluster: LocalCluster) -> Reached:
    """All is read and no release arrives."""
    for gen in ("gen-0", "gen-1"):
        cluster.faults(gen, drop={"release": -1})

    def reached(asked: Asked) -> None:
        in_flight(cluster)
        time.sleep(0.3)

    return reached


def _decoding(cluster: LocalCluster) -> Reached:
    def reached(asked: Asked) -> None:
        seen = b""
        while seen.count(b"data: ") < 3:
            seen += asked.read(4096)

    return reached


def _migrating(cluster: LocalCluster) -> Reached:
    """Its attempts fail one after the other, and it waits between them."""
    cluster.faults("ctx-0", preempt=5)
    return lambda asked: time.sleep(0.3)


STATES: dict[str, Callable[[LocalCluster], Reached]] = {
    "queued": _queued,
    "placed": lambda cluster: _at_ctx(cluster, "queued"),
    "prefilling": lambda cluster: _at_ctx(cluster, "running"),
    "prefilled_unbound": _unbound,
    "reading": _reading,
    "releasing": _releasing,
    "decoding": _decoding,
    "migrating": _migrating,
}


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b7_an_abort_in_each_state_leaves_nothing(shared, model, transport):
    assert set(STATES) == {state.value for state in State} - {state.value for state in TERMINAL}
    with two_gens(shared, model, transport) as cluster:
        idle = idle_latency(cluster)
        for number, bring in enumerate(STATES.values()):
            reached = bring(cluster)
            asked = Asked(cluster, prompt_of(15 * PAGE + 3, 60 + number), 200, stream=True)
            try:
                reached(asked)
            finally:
                asked.leave()
                time.sleep(0.1)
                cluster.cont("gen-0"), cluster.cont("gen-1")
            cluster.poison()
            cluster.quiet(5)
        canary(cluster, model, idle, 2)


# ------------------------------------------------------------------------------------------------- who asks, who reads

IDS = ("a/b", "a_b", "a-0", "x" * 300, "ein-längerer-名前-🧪", "../../etc", "same", "same", "same", "same")


@both
def test_b24_request_ids_of_clients_do_not_meet_in_the_hand_off(shared, model, transport):
    """Also equal ones, at once and in other conversations: what is inside the cluster is named by nobody outside."""
    with two_gens(shared, model, transport) as cluster:
        prompts = [prompt_of(2 * PAGE + 3, 80 + n) for n in range(len(IDS))]
        request = {"logprobs": 5, "return_token_ids": True}

        def ask(number: int) -> dict:
            head = [(b"x-request-id", IDS[number].encode()), (b"x-conversation-id", f"talk {number}".encode())]
            json = body(prompts[number], 16, **request, user="one")
            reply = cluster.post("/v1/completions", json, headers=head)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0] | {"reply_id": reply.json()["id"]}

        with ThreadPoolExecutor(len(IDS)) as threads:
            choices = list(threads.map(ask, range(len(IDS))))
        compare(model, prompts, choices).check()
        assert len({choice["reply_id"] for choice in choices}) == len(IDS)
        for name in ("ctx-0", "gen-0", "gen-1", "router"):
            text = cluster.processes[name].log.read_text()
            assert not any(f'"{given}"' in text for given in IDS), "a client's word is a key"


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_a_gen_that_is_lost_before_it_released_costs_no_prefill(shared, model, transport):
    """Another gen reads the same pages. Prefills are counted: each prompt position is computed once."""
    with two_gens(shared, model, transport) as cluster:
        prompts = [prompt_of(7 * PAGE + 5, s) for s in (100, 101, 102)]
        before = prefilled(cluster, "ctx-0")
        hold(cluster, 3)
        with ThreadPoolExecutor(3) as threads:
            begun = [threads.submit(answer, cluster, p) for p in prompts]
            in_flight(cluster, 3)
            until(lambda: cluster.pages("ctx-0", "pinned") >= 24, 10, lambda: "not all prefilled")
            victim = max(("gen-0", "gen-1"), key=lambda name: cluster.pages(name, "held"))
            assert cluster.pages(victim, "held") >= 8
            cluster.kill(victim)
            for name in ("ctx-0", "gen-1" if victim == "gen-0" else "gen-0"):
                cluster.faults(name)
            choices = [each.result(30) for each in begun]
        compare(model, prompts, choices).check()
        assert prefilled(cluster, "ctx-0") - before == sum(map(len, prompts))
        assert cluster.metric("tailrace_prompt_positions_total", role="gen") == 0
        back_at_its_port(cluster, victim)
        cluster.wait_ready()
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(40, s) for s in range(103, 111)])


@both
def test_a_full_hit_and_a_partial_one_read_only_what_is_missing_and_pin_what_is_there(shared, model, transport):
    """What gen has by hash is found at bind and pinned until the request decodes; ctx is released all the same."""
    with two_gens(shared, model, transport) as cluster:
        prompt = prompt_of(8 * PAGE, 120)
        for _ in range(2):
            answers(cluster, [prompt, prompt], at_once=2)  # on both gens
        cluster.quiet(2)
        before, read = (cluster.settled_metric("tailrace_transfer_bytes_total", kind=k) for k in ("wire", "logical"))
        assert_equal(cluster, model, [prompt])
        cluster.quiet(2)
        assert cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire") == before, "a full hit moved pages"
        assert cluster.metric("tailrace_transfer_bytes_total", kind="logical") == read
        hold(cluster, 10)
        longer = [*prompt, *prompt_of(4 * PAGE, 121)]
        with ThreadPoolExecutor(1) as thread:
            held = thread.submit(answer, cluster, longer)
            in_flight(cluster)
            until(
                lambda: max(cluster.pages(n, "pinned") + cluster.pages(n, "held") for n in ("gen-0", "gen-1")) >= 12,
                5, lambda: "the prefix is not kept",
            )  # fmt: skip
            cluster.poison()
            compare(model, [longer], [held.result(30)]).check()
        moved = cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire") - before
        assert moved == 4 * (pool(1) - pool(0))
