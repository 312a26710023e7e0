"""Frames: round trips of every class from its annotations, and nothing but ProtocolError on any bytes."""

from __future__ import annotations

import dataclasses
import enum
import math
import time
import types
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.errors import ProtocolError
from tailrace.transfer import frames, messages
from tailrace.transfer.messages import Cancel, Delta, Done, Fail, Heartbeat, Peers, Place, Ready, Stats, Tokens, Valid
from tailrace.transfer.page_list import PageList

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = {
    str: TEXT,
    bytes: st.binary(max_size=24),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
}


def values(hint):
    """A strategy for any type hint that a frame may hold, independent of the code under test."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is PageList:
        narrow = st.integers(0, 2**32 - 1)
        pages = st.builds(messages.PageDescriptor, st.integers(0, 2**16 - 1), narrow, narrow, st.integers(0, 2**64 - 1))
        return st.lists(pages, max_size=3).map(PageList.of)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: values(hints[f.name]) for f in dataclasses.fields(hint)})
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if a is type(None) else values(a) for a in args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    raise AssertionError(hint)


ANY_FRAME = st.sampled_from(messages.FRAMES).flatmap(values)


@pytest.mark.parametrize("cls", messages.FRAMES, ids=lambda c: c.__name__)
def test_every_frame_comes_back_equal(cls):
    @settings(max_examples=15, deadline=None)
    @given(values(cls))
    def check(frame):
        back = frames.unpack(frames.pack(frame))
        assert back == frame and type(back) is cls

    check()


@settings(max_examples=50, deadline=None)
@given(st.lists(ANY_FRAME, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_a_stream_cut_anywhere_gives_the_same_frames(sent, cuts):
    stream = b"".join(map(frames.encode, sent))
    decoder, got, at, i = frames.Decoder(), [], 0, 0
    while at < len(stream):
        got += decoder.feed(stream[at : at + cuts[i % len(cuts)]])
        at += cuts[i % len(cuts)]
        i += 1
    assert got == sent


def test_a_round_trip_keeps_types_and_none_and_widens_ints_to_floats():
    place = Place("r", 0, 5, 7, 1, b"", "t", 0, 3, None, 0, b"", (), "")
    back = frames.unpack(frames.pack(place))
    assert back.deadline_s == 3.0 and type(back.deadline_s) is float and back.conversation is None
    ready = Ready("r", 1, (), 8, True)
    assert frames.unpack(frames.pack(ready)).final is True


def test_the_float_infinities_cross():
    fail = frames.unpack(frames.pack(messages.NotNow("r", 0, "pages", 1, 0, math.inf)))
    assert fail.retry_s == math.inf


class Kind(enum.StrEnum):
    LENGTH = "length"


def test_enums_and_lists_are_accepted_from_the_sender_and_arrive_plain():
    done = frames.unpack(frames.pack(Done("r", 0, Kind.LENGTH, "")))
    assert type(done.outcome) is str
    assert frames.unpack(frames.pack(Peers([]))) == Peers(())


@pytest.mark.parametrize(
    "frame",
    [
        Cancel("r", "0", ""),
        Cancel("r", True, ""),
        Cancel(b"r", 0, ""),
        Cancel("r", 0, None),
        Cancel("r", 2**64, ""),
        Cancel("\ud800", 0, ""),
        Fail("r", 0, "lost", "", 1),
        Tokens((Delta,)),
        Tokens(None),
        Stats("r", "p", (("a", "b", "c", (("n", {"k": 1}, 1.0),)),)),
        messages.Bind(0, "r", 0, None, 1, 1, 1, b"", b""),
        messages.NotNow("r", 0, "pages", 1, 0, False),
        messages.Release("r", 0, ((0, 1),)),
        object(),
        messages.PageDescriptor(0, 0, 1, 1),
    ],
    ids=lambda f: type(f).__name__,
)
def test_a_wrong_value_is_found_at_the_sender(frame):
    with pytest.raises(ProtocolError):
        frames.pack(frame)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (["Nonsense", 1], "Nonsense"),
        (["Cancel", "r", 0], "array of 3"),
        (["Cancel", "r", 0, "", "more"], "array of 3"),
        (["Cancel", "r", 0.0, ""], "Cancel.attempt"),
        (["Cancel", "r", True, ""], "Cancel.attempt"),
        (["Cancel", "r", None, ""], "Cancel.attempt"),
        (["Cancel", b"r", 0, ""], "Cancel.request"),
        (["Deaths", "abc"], "Deaths.boots"),
        (["Deaths", ["a", 1]], "Deaths.boots"),
        (["Peers", [["w", "b", "h", "p"]]], "PeerAddress.port"),
        (["Renew", [["r", 0, 0]], 1.0], "Renew.keys"),
        (["Tokens", {"deltas": []}], "Tokens.deltas"),
        (["Stats", "r", "p", [["a", "b", "c", [["n", [], 1.0]]]]], "Stats.families"),
        ([], "no kind"),
        ({"Cancel": 1}, "no kind"),
        ([7, 1], "no kind"),
        ("Cancel", "no kind"),
        ([msgpack.ExtType(5, b"x")], "malformed"),
    ],
)
def test_a_malformed_frame_is_refused_naming_what_is_wrong(array, said):
    with pytest.raises(ProtocolError, match=said):
        frames.unpack(msgpack.packb(array))


def test_the_bound_holds_on_both_sides_and_before_the_bytes_are_there():
    frame = Cancel("r", 0, "x" * 2000)
    with pytest.raises(ProtocolError, match="over the bound of 1000"):
        frames.encode(frame, max_bytes=1000)
    decoder = frames.Decoder(max_bytes=1000)
    with pytest.raises(ProtocolError, match="over the bound of 1000"):
        decoder.feed((1001).to_bytes(4, "big"))


def test_an_array_that_claims_millions_of_items_is_refused_without_holding_them():
    huge = b"\x92\xa6Deaths\xdd" + (1 << 31).to_bytes(4, "big")
    with pytest.raises(ProtocolError):
        frames.unpack(huge)
    with pytest.raises(ProtocolError):
        frames.unpack(b"\x92\xa6Deaths\xdb" + (1 << 31).to_bytes(4, "big"))


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError):
        frames.unpack(b"\x91" * 100_000 + b"\x01")


def test_a_broken_decoder_stays_broken_and_gives_what_came_before():
    good = frames.encode(Valid("r", 0))
    decoder = frames.Decoder()
    got = []
    with pytest.raises(ProtocolError):
        for frame in decoder.frames(good + (1).to_bytes(4, "big") + b"\x01" + good):
            got.append(frame)
    assert got == [Valid("r", 0)]
    with pytest.raises(ProtocolError):
        decoder.feed(good)


def feed_all(decoder, pieces):
    """Feed until the first ProtocolError; any other exception fails the test."""
    for piece in pieces:
        try:
            decoder.feed(piece)
        except ProtocolError:
            return


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_no_bytes_raise_anything_but_protocol_error(pieces):
    feed_all(frames.Decoder(max_bytes=1 << 16), pieces)
    for piece in pieces:
        feed_all(frames.Decoder(), [len(piece).to_bytes(4, "big") + piece])


@settings(max_examples=300, deadline=None)
@given(ANY_FRAME, st.data())
def test_no_mutation_of_a_frame_raises_anything_but_protocol_error(frame, data):
    body = bytearray(frames.pack(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for candidate in (bytes(body), bytes(body[:cut])):
        try:
            frames.unpack(candidate)
        except ProtocolError:
            continue


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXT, st.binary(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(TEXT, st.integers(0, 9)), inner, max_size=3),
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(messages.FRAMES), st.data())
def test_junk_in_the_place_of_fields_raises_nothing_but_protocol_error(cls, data):
    count = len(dataclasses.fields(cls)) + data.draw(st.integers(-1, 1))
    fields = [data.draw(JUNK) for _ in range(max(count, 0))]
    try:
        frame = frames.unpack(msgpack.packb([cls.__name__, *fields]))
    except ProtocolError:
        return
    assert frames.unpack(frames.pack(frame)) == frame or "nan" in repr(frame)


def test_a_map_key_that_cannot_be_hashed_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        frames.unpack(b"\x92\xa6Deaths\x81\x81\x01\x02\x03")


def test_eight_deltas_cross_in_well_under_a_tenth_of_a_millisecond():
    deltas = tuple(Delta("a" * 32, 0, 0, i, messages.pack_ids([i]), (), None, None, (), 0, {}) for i in range(8))
    frame, best = Tokens(deltas), math.inf
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            frames.unpack(frames.pack(frame))
        best = min(best, (time.perf_counter() - started) / 50)
    assert best < 100e-6


def test_every_heartbeat_fits_a_kilobyte():
    beat = Heartbeat("gen-12", "b" * 16, "run", 0.1, 10, 10, 3, 2, 0.5, 100, 1e4, 1e9, ("c" * 16,) * 8)
    assert len(frames.encode(beat)) < 1024
