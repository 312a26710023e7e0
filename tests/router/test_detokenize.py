"""Text of a stream: exact on bytes, whatever the tokens' borders, with stop strings (cases D1, D4, D21)."""

import codecs

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.router.detokenize import TextStream, TokenTable
from tailrace.router.sample import Receipt, Sample
from tailrace.router.stop_strings import StopStrings
from tailrace.transfer.messages import Delta, TokenLogprob, pack_ids


class Bytes:
    """A vocabulary given by its tokens' bytes; the last ids are special."""

    def __init__(self, tokens: list[bytes], special: int = 0) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens)
        self.special_ids = frozenset(range(len(tokens) - special, len(tokens)))

    def id_to_bytes(self, token: int) -> bytes:
        return self.tokens[token]


def stream_of(tokens: list[bytes], stops: list[str] | None = None, *, min_tokens: int = 0, special: int = 0):
    table = TokenTable(Bytes(tokens, special))
    return TextStream(table, StopStrings(stops) if stops else None, min_tokens=min_tokens)


def run(tokens: list[bytes], stops: list[str] | None = None, *, min_tokens: int = 0):
    """(text of each piece, bytes of each piece, tokens used, stopped)."""
    stream = stream_of(tokens, stops, min_tokens=min_tokens)
    pieces, used = [], 0
    for token in range(len(tokens)):
        pieces += stream.push(token)
        used += 1
        if stream.stopped:
            break
    else:
        pieces += stream.finish()
    return [p.text for p in pieces], [p.data for p in pieces], used, stream.stopped


def reference(tokens: list[bytes], stops: list[str], min_tokens: int = 0):
    """Reading byte by byte: (text, tokens used, stopped)."""
    read = b""
    patterns = sorted((s.encode() for s in stops), key=len, reverse=True)
    for count, token in enumerate(tokens, 1):
        for byte in token:
            read += bytes([byte])
            ends = [p for p in patterns if read.endswith(p)]
            if ends and count > min_tokens:
                return read[: -len(ends[0])].decode(errors="replace"), count, True
    return read.decode(errors="replace"), len(tokens), False


alphabets = st.sampled_from([b"ab", "aé😀".encode(), bytes([0xF0, 0x9F, 0x98, 0x80, 0x61]), bytes(range(256))])


@st.composite
def token_lists(draw):
    alphabet = draw(alphabets)
    token = st.lists(st.sampled_from(list(alphabet)), max_size=5).map(bytes)
    return draw(st.lists(token, max_size=14))


stop_lists = st.lists(st.text(st.sampled_from("abé😀"), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(token_lists(), stop_lists, st.integers(0, 6))
@example([b"a", b"b", b"c"], ["ab", "abc"], 0)
@example([b"xab", b"c"], ["bcd", "abcdx", "c"], 0)
@example([b"ab", b"abab"], ["ab"], 1)
def test_pieces_joined_are_the_text_up_to_the_first_stop_string_to_end(tokens, stops, min_tokens):
    texts, data, used, stopped = run(tokens, stops, min_tokens=min_tokens)
    text, expected_used, expected_stopped = reference(tokens, stops, min_tokens)
    assert ("".join(texts), used, stopped) == (text, expected_used, expected_stopped)
    whole = b"".join(data)
    assert whole.decode(errors="replace") == text
    if "\ufffd" not in text:
        assert whole == text.encode()


@settings(max_examples=150, deadline=None)
@given(token_lists())
def test_without_stop_strings_every_token_gives_its_piece_at_once(tokens):
    stream = stream_of(tokens)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token, data in enumerate(tokens):
        (piece,) = stream.push(token)
        assert (piece.token, piece.text, piece.data) == (token, decoder.decode(data), data)
    assert "".join(p.text for p in stream.finish()) == decoder.decode(b"", True)


@settings(max_examples=200, deadline=None)
@given(token_lists(), stop_lists, st.data())
def test_what_was_given_out_is_never_part_of_a_later_match(tokens, stops, data):
    """After any number of tokens, the text so far is a prefix of the final text."""
    stream = stream_of(tokens, stops)
    final, _, _ = reference(tokens, stops)
    given_out = ""
    for token in range(len(tokens)):
        given_out += "".join(p.text for p in stream.push(token))
        assert final.startswith(given_out)
        if stream.stopped:
            break


@settings(max_examples=200, deadline=None)
@given(token_lists(), stop_lists, st.data())
def test_deltas_cut_doubled_and_swapped_give_the_same_sample(tokens, stops, data):
    table = TokenTable(Bytes(tokens or [b"a"]))
    automaton = StopStrings(stops)

    def deltas(cuts: list[int]) -> list[Delta]:
        edges = sorted({0, len(tokens), *cuts})
        spans = list(zip(edges, edges[1:], strict=False)) or [(0, 0)]
        return [
            Delta(
                "r", 1, 0, a, pack_ids(list(range(a, b))), (), "length" if b == len(tokens) else None, None, (), 0, {}
            )
            for a, b in spans
        ]

    whole = Sample(0, TextStream(table, automaton))
    for delta in deltas([]):
        whole.receive(delta)
    cut = deltas(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    again = data.draw(st.permutations(cut + data.draw(st.lists(st.sampled_from(cut), max_size=3))))
    sample = Sample(0, TextStream(table, automaton))
    for delta in again:
        sample.receive(delta)
    assert sample.ids == whole.ids and sample.finish == whole.finish and sample.cut == whole.cut
    assert [(p.token, p.text) for p in sample.take()] == [(p.token, p.text) for p in whole.take()]


def test_an_emoji_over_four_tokens_comes_whole_and_each_token_keeps_its_own_bytes():
    family = "👨‍👩‍👧".encode()
    texts, data, _, _ = run([bytes([b]) for b in family])
    assert "".join(texts) == family.decode() and "\ufffd" not in "".join(texts)
    assert data == [bytes([b]) for b in family]


def test_an_unfinished_character_is_replaced_only_at_the_end():
    stream = stream_of([b"a", b"\xf0\x9f"])
    assert [p.text for p in stream.push(0) + stream.push(1)] == ["a", ""]
    assert [(p.token, p.text) for p in stream.finish()] == [(None, "\ufffd")]


def test_special_tokens_and_the_token_that_ends_a_sample_have_no_text():
    stream = stream_of([b"hi", b"stop", b"<special>"], special=1)
    pieces = stream.push(0) + stream.push(2) + stream.push(1, ends=True)
    assert [(p.token, p.text, p.data) for p in pieces] == [(0, "hi", b"hi"), (2, "", b""), (1, "", b"")]


def test_a_special_token_inside_a_stop_string_is_overlooked():
    stream = stream_of([b"EN", b"D", b"<s>"], ["END"], special=1)
    assert stream.push(0) == [] and stream.push(2) == []
    assert [(p.token, p.text) for p in stream.push(1)] == [(0, ""), (2, ""), (1, "")]
    assert stream.stopped


def test_held_tokens_come_in_order_once_they_can_be_no_stop_string():
    stream = stream_of([b"\n", b"\n", b"x"], ["\n\n\n"])
    assert stream.push(0) == [] and stream.push(1) == []
    assert [(p.token, p.text) for p in stream.push(2)] == [(0, "\n"), (1, "\n"), (2, "x")]


def test_a_token_is_cut_where_the_stop_string_begins_inside_it():
    stream = stream_of([b"hello EN", b"D and more"], ["END"])
    assert stream.push(0) == []
    assert [(p.token, p.text, p.data) for p in stream.push(1)] == [(0, "hello ", b"hello "), (1, "", b"")]
    assert stream.push(0) == []  # nothing follows a stop


def test_logprobs_travel_with_their_tokens():
    stream = stream_of([b"a", b"b"], ["ab"])
    first, second = TokenLogprob(0, -1.0, ()), TokenLogprob(1, -2.0, ())
    assert stream.push(0, first) == []
    assert [p.logprob for p in stream.push(1, second)] == [first, second]


def test_an_id_beyond_the_vocabulary_has_no_text():
    table = TokenTable(Bytes([b"a"]))
    assert table.literal(7) == b"" and table.literal(-1) == b""


def test_labels_name_bytes_that_are_no_character():
    table = TokenTable(Bytes([b"a", b"\xf0\x9f", "é".encode()]))
    assert [table.label(i) for i in range(3)] == ["a", "bytes:\\xf0\\x9f", "é"]


def test_an_echoed_prompt_may_end_within_a_character_that_the_output_completes():
    table = TokenTable(Bytes([b"x\xf0\x9f", b"\x98\x80y"]))
    stream = TextStream(table, open_bytes=table.open_bytes([0]))
    assert [p.text for p in stream.push(1)] == ["😀y"]


def test_a_gap_is_waited_for_and_malformed_deltas_are_refused():
    sample = Sample(0, TextStream(TokenTable(Bytes([b"a", b"b"]))))
    late = Delta("r", 1, 0, 1, pack_ids([1]), (), "length", None, (), 0, {})
    assert sample.receive(late) is Receipt.EARLY and sample.waits_for_gap and sample.finish is None
    wrong = Delta("r", 1, 0, 0, pack_ids([0]), (TokenLogprob(0, -1.0, ()),) * 2, None, None, (), 0, {})
    with pytest.raises(ValueError, match="2 logprobs for 1 tokens"):
        sample.receive(wrong)
    first = Delta("r", 1, 0, 0, pack_ids([0]), (), None, None, (), 0, {})
    assert sample.receive(first) is Receipt.NEW and sample.finish == "length" and not sample.waits_for_gap
    assert sample.receive(first) is Receipt.STALE
