"""Grammars: every output follows its own, nobody else's changes, and state is a function of the output ids."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Reference, greedy, reference

from tailrace.engine.grammar import GrammarError, GrammarQueue, Grammars
from tailrace.engine.sequence import Sequence
from tailrace.model.grammar_text import grammar_text, why_unusable
from tailrace.model.sampling_params import SamplingParams

DIGITS = grammar_text("regex", "[0-9]{3}-[0-9]{4}")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = grammar_text("json_schema", SCHEMA)


@pytest.fixture(scope="module")
def ref(tiny) -> Reference:
    return reference(tiny("llama"), num_pages=512, max_num_tokens=64, max_batch_size=8)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(4, 512, length).tolist()


def asked(grammar: str, max_tokens: int = 400, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 1.0, "seed": 7, "grammar": grammar} | more)


def text_of(ref: Reference, ids: list[int]) -> str:
    tokenizer = ref.source.tokenizer
    return b"".join(tokenizer.id_to_bytes(i) for i in ids if i not in ref.source.eos_ids).decode()


def grammars_of(ref: Reference, **options: Any) -> Grammars:
    return Grammars(lambda: ref.source.tokenizer, ref.source.config.vocab_size, ref.source.eos_ids, **options)


# ------------------------------------------------------------------------------------------------------- what comes out

LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 99},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"enum": ["a", 1, None, [1, "x"], {"k": True}]},
        {"const": "über"},
    ]
)


def objects(inner: st.SearchStrategy) -> st.SearchStrategy:
    names = st.lists(st.sampled_from(["a", "b b", "ç", 'q"', "n1"]), unique=True, min_size=1, max_size=3)

    def build(keys: list[str], values: list[dict], optional: bool) -> dict:
        properties = dict(zip(keys, values, strict=False))
        required = list(properties)[: 1 if optional else None]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, names, st.lists(inner, min_size=3, max_size=3), st.booleans())


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 3}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=4,
)


def test_what_a_random_model_says_under_a_random_schema_validates(ref):
    ended = [0, 0]

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS, st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 2.0]))
    def check(schema: dict, seed: int, temperature: float):
        params = asked(grammar_text("json_schema", schema), 300, seed=seed, temperature=temperature)
        result = ref.generate([prompt_of(9, seed)], params)[0]
        assert result.error is None
        sample = result.samples[0]
        ended[sample.finish_reason == "stop"] += 1
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(text_of(ref, sample.ids)), schema, jsonschema.Draft202012Validator)

    check()
    assert ended[1] >= 30, ended  # else nothing was tested


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0},
        {"top_k": 3},
        {"top_p": 0.05},
        {"min_p": 0.9},
        {"logit_bias": tuple((i, 100.0) for i in range(4, 40)) + ((1, 100.0),)},
        {"min_tokens": 200},
        {"ignore_eos": True},
        {"logprobs": 5},
    ],
    ids=lambda more: next(iter(more)),
)
def test_every_other_parameter_leaves_the_grammar_in_force(ref, more):
    result = ref.generate([prompt_of(12)], asked(PERSON, **more), samples=2)[0]
    assert result.error is None
    for sample in result.samples:
        assert sample.finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(ref, sample.ids)), SCHEMA)


def test_the_first_token_obeys_and_the_last_one_ends_the_sample(ref):
    for seed in range(6):
        sample = ref.generate([prompt_of(5, seed)], asked(DIGITS, seed=seed))[0].samples[0]
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", text_of(ref, sample.ids))
        # Nothing can follow, so no EOS was drawn for it.
        assert sample.finish_reason == "stop" and sample.ids[-1] not in ref.source.eos_ids


def test_eos_comes_only_where_the_grammar_accepts_and_ends_the_sample(ref):
    eos = next(iter(ref.source.eos_ids))
    open_ended = grammar_text("regex", "(ab)+")
    wants_eos = asked(open_ended, logit_bias=((eos, 100.0),))
    sample = ref.generate([prompt_of(5)], wants_eos)[0].samples[0]
    assert sample.ids[-1] == eos and text_of(ref, sample.ids) == "ab" and sample.finish_reason == "stop"
    later = ref.generate([prompt_of(5)], replace(wants_eos, min_tokens=9))[0].samples[0]
    assert len(later.ids) == 10 and later.ids[-1] == eos or len(later.ids) == 11  # an `a` may stand open at 9
    assert re.fullmatch("(ab)+", text_of(ref, later.ids))
    never = ref.generate([prompt_of(5)], replace(wants_eos, ignore_eos=True, max_tokens=30))[0].samples[0]
    assert never.finish_reason == "length" and eos not in never.ids


def test_max_tokens_may_cut_it_off(ref):
    sample = ref.generate([prompt_of(5)], asked(PERSON, 4))[0].samples[0]
    assert sample.finish_reason == "length" and len(sample.ids) == 4
    assert text_of(ref, sample.ids).startswith("{")


def test_a_stop_id_that_the_grammar_allows_ends_the_sample(ref):
    dash = ref.source.tokenizer.encode("-", special=False)[0]
    sample = ref.generate([prompt_of(5)], asked(DIGITS, stop_token_ids=(dash,)))[0].samples[0]
    assert sample.ids[-1] == dash and sample.finish_reason == "stop" and len(sample.ids) <= 4


def test_logprobs_are_those_of_the_model_not_of_the_mask(ref):
    prompt = prompt_of(12)
    free = ref.generate([prompt], greedy(1))[0].samples[0].logprobs[0]
    bound = ref.generate([prompt], greedy(1, grammar=DIGITS))[0].samples[0].logprobs[0]
    assert bound.top == free.top  # the alternatives are the model's, whatever was allowed
    assert bound.token != free.token and bound.logprob <= free.logprob


# --------------------------------------------------------------------------------------------------------------- mates


def test_rows_without_a_grammar_are_as_if_alone_and_a_failing_one_fails_alone(ref):
    prompts = [prompt_of(20 + i, i) for i in range(6)]
    params = [greedy(12), greedy(12, grammar=PERSON), greedy(12), greedy(12, grammar='{"kind":"regex","value":"("}')]
    params += [asked(DIGITS, 12), greedy(12, grammar=grammar_text("lark", "start: missing_rule"))]
    results = ref.generate(prompts, params)
    for i in (0, 2, 1, 4):
        assert results[i].error is None
        assert results[i].ids == ref.generate([prompts[i]], params[i])[0].ids
    for i in (3, 5):
        assert "cannot be compiled" in str(results[i].error) and results[i].ids == []


def test_a_grammar_that_gives_up_half_way_fails_its_own_sample(ref):
    states = ref.grammars.states(PERSON, [[]])
    states[0].accept(ref.source.tokenizer.encode("x", special=False)[0])
    assert states[0].error and not states[0].ended
    assert not states[0].allowed().any()


# ------------------------------------------------------------------------------------------------ state from output ids


def test_state_read_again_from_the_ids_is_the_state_that_was(ref):
    grammars = grammars_of(ref)
    ids = ref.generate([prompt_of(12)], asked(PERSON))[0].ids
    (walked,) = grammars.states(PERSON, [[]])
    for at, token in enumerate(ids):
        (again,) = grammars.states(PERSON, [ids[:at]])
        assert (again.allowed() == walked.allowed()).all() and again.allowed()[token]
        walked.accept(token)
    assert walked.ended and not grammars.states(PERSON, [ids[:-1]])[0].ended


def test_an_output_that_does_not_follow_the_grammar_is_an_error(ref):
    with pytest.raises(GrammarError, match="does not follow"):
        grammars_of(ref).states(DIGITS, [ref.source.tokenizer.encode("hello", special=False)])


def test_special_tokens_are_never_allowed_and_eos_only_at_the_end(ref):
    (state,) = grammars_of(ref).states(grammar_text("regex", r"(.|\n)*"), [[]])
    allowed = {int(i) for i in np.flatnonzero(state.allowed())}
    assert allowed & ref.source.tokenizer.special_ids == ref.source.eos_ids
    assert len(allowed) > 200


def test_a_model_without_eos_ends_with_its_grammar(ref):
    grammars = Grammars(lambda: ref.source.tokenizer, ref.source.config.vocab_size, ())
    ids = ref.source.tokenizer.encode("555-1234", special=False)
    assert grammars.states(DIGITS, [ids])[0].ended
    (half,) = grammars.states(DIGITS, [ids[:-1]])
    assert len(half.allowed()) == ref.source.config.vocab_size and half.allowed().any()


# ------------------------------------------------------------------------------------------------------ cache and queue


def test_the_cache_is_bounded_and_keeps_what_was_used_last(ref):
    grammars = grammars_of(ref, max_compiled=3)
    texts = [grammar_text("regex", f"[0-9]{{{n}}}") for n in range(1, 6)]
    for text in texts:
        grammars.states(text, [[]])
        grammars.states(texts[0], [[]])
    assert len(grammars) == 3
    assert grammars.begin(texts[0], [[]]).done() and grammars.begin(texts[4], [[]]).done()


class SlowGrammars(Grammars):
    """Compiles only when let."""

    gate = threading.Event()

    def _compile(self, text: str) -> Any:
        assert self.gate.wait(10)
        return super()._compile(text)


def sequence_of(grammar: str) -> Sequence:
    return Sequence.for_prefill(
        ("r", 1), np.array([5, 6], np.int32), [], greedy(5, grammar=grammar), 2, frozenset({1})
    )  # fmt: skip


def test_while_one_grammar_is_compiled_other_requests_go_on(ref):
    grammars = SlowGrammars(lambda: ref.source.tokenizer, ref.source.config.vocab_size, ref.source.eos_ids)
    queue: GrammarQueue[str] = GrammarQueue(grammars)
    going: list[str] = []
    slow, plain = sequence_of(PERSON), sequence_of("")
    started = time.monotonic()
    assert queue.add("slow", [slow], going.append) is None
    assert queue.add("cancelled", [sequence_of(DIGITS)], going.append) is None
    assert queue.add("plain", [plain], going.append) is None
    assert going == ["plain"] and len(queue) == 2 and queue.ready() == []
    assert time.monotonic() - started < 5
    queue.remove("cancelled")
    grammars.gate.set()
    deadline = time.monotonic() + 20
    found: list = []
    while not found and time.monotonic() < deadline:
        found = queue.ready()
    assert found == [("slow", None)] and len(queue) == 0
    assert [s.grammar is not None for s in slow.samplers] == [True, True]
    assert slow.samplers[0].grammar is not slow.samplers[1].grammar
    again = sequence_of(PERSON)
    assert queue.add("again", [again], going.append) is None and going == ["plain", "again"]
    assert again.samplers[0].grammar is not None


def test_a_worker_without_grammars_says_so_and_a_bad_one_is_told(ref):
    going: list[str] = []
    nowhere: GrammarQueue[str] = GrammarQueue(None)
    assert "no grammars" in str(nowhere.add("a", [sequence_of(PERSON)], going.append))
    queue: GrammarQueue[str] = GrammarQueue(grammars_of(ref))
    why = queue.add("bad", [sequence_of(grammar_text("regex", "("))], going.append)
    if why is None:  # not known at once
        deadline = time.monotonic() + 20
        found: list = []
        while not found and time.monotonic() < deadline:
            found = queue.ready()
        assert found[0][0] == "bad"
        why = found[0][1]
    assert "cannot be compiled" in why and going == [] and len(queue) == 0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (grammar_text("json_schema", {"not": {}}), "not"),
        (grammar_text("json_schema", {"type": "array", "uniqueItems": True}), "uniqueItems"),
        (grammar_text("json_schema", {"type": "strang"}), "strang"),
        (grammar_text("regex", "a(?=b)"), "look-around"),
        (grammar_text("lark", "start: other"), "other"),
        (grammar_text("poem"), "poem"),
        (grammar_text("json_schema", False), "empty"),
    ],
)
def test_what_cannot_be_followed_is_named(text: str, word: str):
    assert word in str(why_unusable(text))


def test_what_can_be_followed_is_fine():
    for text in (PERSON, DIGITS, grammar_text("json_object"), grammar_text("json_schema", True)):
        assert why_unusable(text) is None


def test_a_special_token_that_a_grammar_names_is_demanded_by_its_id(ref):
    marker = ref.source.tokenizer.id_of("<|im_start|>")
    grammar = grammar_text("lark", f'start: <[{marker}]> "[" /[0-9]+/ "]"')
    assert why_unusable(grammar) is None
    ids = ref.generate([prompt_of(8)], asked(grammar, 60, temperature=0.0))[0].ids
    assert ids[0] == marker
    assert re.match(r"\[[0-9]", text_of(ref, ids[1:]))
