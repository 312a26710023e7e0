"""Bound outputs over a real hand-off: EQ with one process, from ctx's first token on, and across the death of a gen."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from equal import Model, prompt_of, tiny
from harness import LocalCluster, sse_events, until
from oracle import MARGIN, Comparison, greedy
from pydantic import BaseModel

from tailrace.engine.offline import Sample
from tailrace.model.grammar_text import grammar_text
from tailrace.model.sampling_params import SamplingParams

CONFIG = {"tokens_per_page": 16, "max_num_tokens": 64}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["river", "mill"]},
        "depths": {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "kind", "depths"],
    "additionalProperties": False,
}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, grammar_text("json_schema", SCHEMA)),
    ({"type": "json_object"}, grammar_text("json_object")),
    ({"type": "regex", "regex": "(ab|[0-9]{3},)+"}, grammar_text("regex", "(ab|[0-9]{3},)+")),
]
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 900}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(scope="module")
def cluster(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), model.spec, gen=2, **CONFIG) as running:
        running.poison()
        yield running
        running.quiet()


def expected(model: Model, prompt: Sequence[int], grammar: str, max_tokens: int) -> Sample:
    """REF with the whole distribution beside each token, so that the margin can be taken among what was allowed."""
    params = greedy(max_tokens, grammar=grammar, ignore_eos=False, logprobs=model.ref.source.config.vocab_size)
    (result,) = model.ref.generate([prompt], params)
    assert result.error is None
    return result.samples[0]


def unclear(model: Model, grammar: str, sample: Sample) -> set[int]:
    """Positions where REF's best two allowed tokens are too near each other."""
    (state,) = model.ref.grammars.states(grammar, [[]])
    found = set()
    for at, logprob in enumerate(sample.logprobs):
        allowed = state.allowed()
        values = [value for token, value in logprob.top if allowed[token]][:2]
        if len(values) == 2 and values[0] - values[1] <= MARGIN:
            found.add(at)
        state.accept(sample.ids[at])
    return found


def test_bound_outputs_are_those_of_one_process(cluster, model):
    comparison = Comparison()
    for at, (form, grammar) in enumerate(FORMS):
        for seed in range(4):
            prompt = prompt_of(30 + 17 * seed, 100 * at + seed)
            want = expected(model, prompt, grammar, 48)
            reply = cluster.complete(prompt, 48, response_format=form, return_token_ids=True)
            (choice,) = reply["choices"]
            comparison.add(want.logprobs, choice["token_ids"], unclear=unclear(model, grammar, want))
            if choice["token_ids"] == want.ids:
                assert choice["finish_reason"] == want.finish_reason
            if form["type"] == "json_schema" and choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    comparison.check()
    assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0


def test_one_token_and_several_seeded_samples_obey(cluster):
    form = {"type": "regex", "regex": "[xyz][0-9]{4}"}
    one = cluster.complete(prompt_of(40, 900), 1, response_format=form)["choices"][0]
    assert one["finish_reason"] == "length" and re.match("[xyz]", one["text"])
    options = {"n": 4, "temperature": 1.5, "seed": 11, "top_p": 0.95, "presence_penalty": 1.0, "min_tokens": 2}
    first = cluster.complete(prompt_of(40, 901), 20, response_format=form, **options)["choices"]
    again = cluster.complete(prompt_of(40, 901), 20, response_format=form, **options)["choices"]
    assert [c["text"] for c in first] == [c["text"] for c in again]
    assert all(re.fullmatch("[xyz][0-9]{4}", c["text"]) and c["finish_reason"] == "stop" for c in first)
    assert len({c["text"] for c in first}) > 1


def test_d24_a_bound_stream_goes_on_as_if_nothing_had_happened_when_its_gen_is_killed(cluster, model):
    prompt, max_tokens, grammar = prompt_of(50, 77), 1500, grammar_text("json_schema", NUMBERS)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
    params = greedy(max_tokens, grammar=grammar, ignore_eos=False, logprobs=512)
    want = model.ref.generate([prompt], params)[0].samples[0]
    with cluster.streaming(prompt, max_tokens, response_format=form, return_token_ids=True) as reply:
        events = sse_events(reply)
        found = [json.loads(next(events)) for _ in range(5)]
        until(lambda: bool(busy_gens(cluster)), 10, lambda: "no gen has pages in use")
        (victim,) = busy_gens(cluster)
        cluster.kill(victim)
        found += [json.loads(event) for event in events if event != "[DONE]"]
    ids = [i for event in found for choice in event["choices"] for i in choice["token_ids"]]
    comparison = Comparison()
    comparison.add(want.logprobs, ids, unclear=unclear(model, grammar, want))
    comparison.check(0.2)  # a tie may come early in so long an output
    assert len(ids) == max_tokens
    assert cluster.settled_metric("tailrace_migrations_total") >= 1
    text = "".join(choice["text"] for event in found for choice in event["choices"])
    assert re.fullmatch(r"\[[ \n0-9,.eE+-]*", text), text[:200]
    cluster.start("gen", victim)
    cluster.wait_ready()


@pytest.mark.soak
def test_d24_two_bound_samples_go_on_each_as_it_was_when_their_gen_is_killed(cluster, model):
    """Grammar, seed and n = 2: each sample goes on with its own draws and its own place in the grammar."""
    prompt, max_tokens, grammar = prompt_of(50, 78), 1000, grammar_text("json_schema", NUMBERS)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
    drawn = {"temperature": 0.8, "seed": 21}
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar, **drawn)
    (want,) = model.ref.generate([prompt], params, 2)
    before = cluster.settled_metric("tailrace_migrations_total")
    options = {"response_format": form, "return_token_ids": True, "n": 2, **drawn}
    with cluster.streaming(prompt, max_tokens, **options) as reply:
        events = sse_events(reply)
        found = [json.loads(next(events)) for _ in range(10)]
        until(lambda: bool(busy_gens(cluster)), 10, lambda: "no gen has pages in use")
        (victim,) = busy_gens(cluster)
        cluster.kill(victim)
        found += [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for event in found for choice in event["choices"]]
    for index, sample in enumerate(want.samples):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [i for choice in mine for i in choice["token_ids"]] == sample.ids
        assert "".join(choice["text"] for choice in mine) == model.text(sample.ids)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [sample.finish_reason]
    assert want.samples[0].ids != want.samples[1].ids
    assert cluster.settled_metric("tailrace_migrations_total") > before
    cluster.start("gen", victim)
    cluster.wait_ready()


def busy_gens(cluster: LocalCluster) -> list[str]:
    return [name for name in ("gen-0", "gen-1") if cluster.pages(name, "held") > 0]


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.soak
def test_the_real_model_makes_a_demanded_call_and_follows_a_schema(tmp_path):
    model = Model("smollm2")
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    }
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    with LocalCluster(tmp_path, model.spec, kv_bytes=128 * 2**20, max_num_tokens=64) as cluster:
        cluster.poison()
        client = cluster.openai()
        options: Any = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 80}
        named = {"type": "function", "function": {"name": "get_weather"}}
        reply = client.chat.completions.create(tools=[tool], tool_choice=named, **options)
        (choice,) = reply.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, parameters)
        pieces = []
        for chunk in client.chat.completions.create(tools=[tool], tool_choice=named, stream=True, **options):
            pieces += [c.function.arguments for d in chunk.choices for c in d.delta.tool_calls or ()]
        assert json.loads("".join(pieces)) == arguments and len(pieces) > 3
        prompt = model.ref.source.tokenizer.encode("A river and its depths, as JSON:", special=False)
        form, grammar = FORMS[0]
        want = expected(model, prompt, grammar, 40)
        got = cluster.complete(prompt, 40, response_format=form, return_token_ids=True)["choices"][0]
        comparison = Comparison()
        comparison.add(want.logprobs, got["token_ids"], unclear=unclear(model, grammar, want))
        comparison.check()
        assert got["finish_reason"] == want.finish_reason == "stop"
        jsonschema.validate(json.loads(got["text"]), SCHEMA)
        person = client.chat.completions.parse(
            model="smollm2", temperature=0, max_tokens=60, response_format=Person,
            messages=[{"role": "user", "content": "Ada Lovelace died at 36. Give her name and age."}],
        ).choices[0].message.parsed  # fmt: skip
        assert person is not None and person.name
        before = time.monotonic()
        while cluster.settled_metric("tailrace_active_requests") and time.monotonic() < before + 5:
            time.sleep(0.1)
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
        cluster.quiet()
