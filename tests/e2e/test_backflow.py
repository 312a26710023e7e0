"""Back-flow on real processes: the second turn of a conversation finds the first one's answer at ctx, and is right."""

from __future__ import annotations

from pathlib import Path

from equal import answer, compare, prompt_of, tiny
from fault_cases import PAGE, settings
from harness import LocalCluster, until


def test_the_second_turn_is_a_prefix_hit_over_the_first_ones_answer(tmp_path: Path):
    model = tiny(tmp_path / "model", "llama")
    config = settings("shm", backflow=True, max_request_tokens=400)
    with LocalCluster(tmp_path / "run", model.spec, **config) as cluster:
        history, prompts, choices, before = prompt_of(3 * PAGE + 5, 1), [], [], 0
        for turn in range(3):
            prompts.append(list(history))
            choices.append(answer(cluster, history, 40))
            computed = len(history) + 40 - 1  # the last token's state is never computed
            until(
                lambda turn=turn: cluster.metric("tailrace_backflow_offers_total", result="read") == turn + 1, 10,
                lambda: "ctx has not read the turn",
            )  # fmt: skip
            history = [*history, *choices[-1]["token_ids"], *prompt_of(9, 10 + turn)]
            if turn:
                cached = choices[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == before // PAGE * PAGE, "the prompt and the generated blocks of the turn before"
            before = computed
        compare(model, prompts, choices, 40).check()
        generated = sum(40 - 1 for _ in choices)
        assert cluster.settled_metric("tailrace_backflow_tokens_total") >= generated // PAGE * PAGE - 2 * PAGE
        cluster.quiet()
