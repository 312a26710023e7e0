"""Whatever JSON a client sends: it is refused as its own fault, or it becomes a frame that every worker accepts."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.errors import ClientError
from tailrace.router.api_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from tailrace.router.sampling import Limits, check_before_tokenizing, sampling_params
from tailrace.router.stop_strings import StopStrings
from tailrace.transfer import frames
from tailrace.transfer.messages import Place, Submit

LIMITS = Limits(vocab_size=50, max_request_tokens=64)

numbers = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**30]), st.floats(), st.floats(-2, 2)
)
words = st.one_of(
    st.text(max_size=5), st.sampled_from(["text", "user", "system", "7", "50", "-1", "json_object", "type"])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
likely = {
    "prompt": st.one_of(values, words, st.lists(st.integers(-1, 51), min_size=1, max_size=4)),
    "messages": st.one_of(values, st.lists(st.fixed_dictionaries({"role": words, "content": values}), max_size=3)),
    "stop": st.one_of(values, st.lists(words, max_size=3)),
    "logit_bias": st.one_of(values, st.dictionaries(st.integers(-1, 51).map(str), numbers, max_size=3)),
    "stop_token_ids": st.one_of(values, st.lists(st.integers(-1, 51), max_size=3)),
    "stream_options": st.one_of(values, st.dictionaries(st.just("include_usage"), values, max_size=1)),
}


def bodies(kind, needed):
    fields = {name: likely.get(name, st.one_of(values, numbers)) for name in kind.model_fields}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)
    given_fields = chosen.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in names}))
    return st.tuples(given_fields, st.booleans()).map(lambda pair: {**needed, **pair[0]} if pair[1] else pair[0])


def through(kind, body):
    """The whole way from bytes to frames."""
    try:
        parsed = parse_body(kind, json.dumps(body).encode())
        if kind in (TokenizeBody, DetokenizeBody):
            return
        check_before_tokenizing(parsed, LIMITS)
        params = sampling_params(parsed, 3, LIMITS, "prompt")
    except ClientError as error:
        assert 400 <= error.status < 500 and error.message
        assert error.param is None or error.param.split(".")[0].split("[")[0] in kind.model_fields
        return
    if parsed.stop:
        StopStrings(parsed.stop)
    submit = Submit(
        "r", 1, "prefill", b"", b"", params, parsed.n, b"", b"", parsed.priority, 1.0, parsed.timeout_s, False
    )
    place = Place(
        "r", 1, 3, params.max_tokens, parsed.n, b"", "", parsed.priority, parsed.timeout_s, parsed.conversation_id, 0,
        b"", (), "",
    )  # fmt: skip
    assert frames.unpack(frames.pack(submit)) == submit and frames.unpack(frames.pack(place)) == place
    assert 0 <= params.seed < 2**64 and params.max_tokens <= 61 and 1 <= parsed.n <= 128
    assert all(0 <= token < 50 for token in (*params.stop_token_ids, *(t for t, _ in params.logit_bias)))


@settings(max_examples=120, deadline=None)
@given(bodies(CompletionBody, {"prompt": "a"}))
def test_completions(body):
    through(CompletionBody, body)


@settings(max_examples=120, deadline=None)
@given(bodies(ChatBody, {"messages": [{"role": "user", "content": "a"}]}))
def test_chat(body):
    through(ChatBody, body)


@settings(max_examples=100, deadline=None)
@given(bodies(TokenizeBody, {"prompt": "a"}), bodies(DetokenizeBody, {"tokens": [1]}))
def test_tokenize_and_detokenize(tokenize, detokenize):
    through(TokenizeBody, tokenize)
    through(DetokenizeBody, detokenize)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(data):
    try:
        parse_body(CompletionBody, data)
    except ClientError as error:
        assert error.status == 400
