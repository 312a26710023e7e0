"""Tool calls in text: found however the text is cut, given out once, and never half of one as content."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.router.call_reader import CallReader, Malformed
from tailrace.router.tool_calls import DIALECTS, CallArguments, CallStart, Content, ToolStream, dialect_of

NAMES = {"weather", "add"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def pieces(text: str, seed: int) -> list[str]:
    rng, out = random.Random(seed), []
    while text:
        n = rng.randint(1, 7)
        out.append(text[:n])
        text = text[n:]
    return out


def read(
    text: str, kind: str = "hermes", *, seed: int = 0, cut: bool = False, **options: bool
) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls) of a text fed in pieces."""
    stream = ToolStream(DIALECTS[kind], NAMES, **options)
    events = [event for piece in pieces(text, seed) for event in stream.feed(piece)] + stream.finish(cut=cut)
    content = "".join(e.text for e in events if isinstance(e, Content))
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls) and event.id
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return content, [(name, arguments) for name, arguments in calls]


def written(kind: str, calls: list[tuple[str, dict]]) -> str:
    key = DIALECTS[kind].argument_keys[0]
    objects = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    if kind == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    return "; ".join(objects) if kind == "llama3" else f"[TOOL_CALLS][{', '.join(objects)}]"


@pytest.mark.parametrize("kind", sorted(DIALECTS))
@pytest.mark.parametrize("eager", [True, False])
def test_any_calls_come_back_however_the_text_is_cut(kind: str, eager: bool):
    @settings(max_examples=80, deadline=None)
    @given(CALLS, st.integers(0, 10**6), st.sampled_from(["", "Let me see.", "1 < 2 and <tool or [TOOL"]))
    def check(calls: list[tuple[str, dict]], seed: int, before: str):
        before = "" if kind == "llama3" else before
        text = written(kind, calls)
        content, found = read(f"{before}\n{text}" if before else text, kind, seed=seed, eager=eager)
        assert content == before
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls

    check()


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='<tool_ca/>{}[]"\\ \nnameTOOLCS:,', max_size=60), st.integers(0, 10**6))
def test_text_without_a_call_is_content_to_the_last_character(text: str, seed: int):
    for kind in DIALECTS:
        content, calls = read(text, kind, seed=seed)
        assert calls == [] and content == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ],
)
def test_no_part_of_a_call_is_ever_content(kind: str, text: str):
    stream = ToolStream(DIALECTS[kind], NAMES)
    events = [event for char in text for event in stream.feed(char)]
    assert not [e for e in events if isinstance(e, Content)]
    starts = [e for e in events if isinstance(e, CallStart)]
    assert [s.name for s in starts] == ["weather"] and stream.num_calls == 1
    parts = [e.text for e in events if isinstance(e, CallArguments)]
    assert "".join(parts) == '{"city": "Oslo"}' and len(parts) > 5  # given out as they are written


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> done',
        '<tool_call>{"name": "weather", "arguments": ["Oslo"]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>weather(Oslo)</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": "Os',
        "a <tool_call>",
        "a <tool_c",
    ],
)
def test_a_malformed_or_unfinished_call_is_content(text: str):
    assert read(text, eager=False) == (text, [])


def test_after_a_malformed_call_a_good_one_is_found():
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    content, calls = read(f"<tool_call>oh</tool_call>{good}", eager=False)
    assert content == "<tool_call>oh</tool_call>" and calls == [("add", '{"a": 1}')]


def test_a_stream_keeps_a_call_that_breaks_after_its_name_was_sent():
    content, calls = read('<tool_call>{"name": "add", "arguments": {"a": x}}</tool_call> and on')
    assert calls == [("add", '{"a": x}}')] and content == " and on"


def test_a_call_cut_off_by_max_tokens_is_a_call_with_what_there_is():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b'
    for eager in (True, False):
        assert read(text, cut=True, eager=eager) == ("", [("add", '{"a": 1, "b')])
    assert read('<tool_call>{"name": "ad', cut=True) == ('<tool_call>{"name": "ad', [])


def test_only_the_first_call_counts_where_several_are_not_wanted():
    text = written("hermes", [("add", {"a": 1}), ("weather", {})])
    assert read(text, parallel=False) == ("", [("add", '{"a": 1}')])


def test_missing_arguments_are_an_empty_object_and_the_name_may_come_last():
    assert read('<tool_call>{"name": "add"}</tool_call>') == ("", [("add", "{}")])
    assert read('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>') == ("", [("add", '{"a": 1}')])
    assert read('<tool_call>{"name": "add", "arguments": {}}') == ("", [("add", "{}")])  # the ending is missing


def test_text_after_calls_is_content():
    text = written("hermes", [("add", {})]) + "\n\nDone.\n"
    assert read(text) == ("\n\nDone.\n", [("add", "{}")])


def test_a_json_answer_with_a_name_is_no_call():
    answer = '{"name": "Ada", "parameters": {"born": 1815}}'
    assert read(answer, "llama3", eager=False) == (answer, [])
    assert read(answer, "llama3") == (answer, [])


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='{}[]",:\\ntrue0123.-eE ', max_size=30))
def test_the_reader_refuses_what_json_refuses(text: str):
    """Whatever it calls done is JSON."""
    reader = CallReader(("arguments",))
    head = '{"name": "f", "x": '
    try:
        used = reader.push(head + text + "}")
    except Malformed:
        with pytest.raises(ValueError):
            json.loads(head + text + "}")
        return
    if reader.done:
        json.loads((head + text + "}")[:used])
    else:
        with pytest.raises(ValueError):
            json.loads(head + text + "}")


def test_dialects_are_told_from_templates():
    assert dialect_of("{{ '<tool_call>' }}").name == "hermes"
    assert dialect_of("[TOOL_CALLS]").name == "mistral"
    assert dialect_of('{"name": f, "parameters": d}').name == "llama3"
    assert dialect_of(None).name == dialect_of("plain").name == "hermes"
    assert len(DIALECTS["mistral"].new_id()) == 9 and DIALECTS["hermes"].new_id().startswith("call_")
