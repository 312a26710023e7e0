"""Descriptors as columns: the same sequence, small on the wire, and nothing else is taken for one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.errors import ProtocolError
from tailrace.transfer import frames
from tailrace.transfer.messages import Landed, PageDescriptor
from tailrace.transfer.page_list import PageList, UnitList

_DESCRIPTORS = st.builds(
    PageDescriptor,
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


def _landed(pages: object) -> Landed:
    return Landed("r", 1, 2, 3, 64, 5, pages)  # pyright: ignore[reportArgumentType]


@settings(max_examples=100, deadline=None)
@given(st.lists(_DESCRIPTORS, max_size=40), st.booleans())
def test_a_list_survives_the_wire_and_is_the_same_sequence(descriptors, alike):
    if alike:
        descriptors = [PageDescriptor(1, 7 + i, d.page, 9) for i, d in enumerate(descriptors)]
    pages = PageList.of(descriptors)
    back = frames.unpack(frames.pack(_landed(pages))).pages
    assert back == pages == descriptors and tuple(descriptors) == back and hash(back) == hash(pages)
    assert list(back) == descriptors and [back[i] for i in range(len(back))] == descriptors
    assert list(back[1:-1]) == descriptors[1:-1]
    if descriptors:
        assert back != descriptors[1:] and back != [*descriptors[:-1], PageDescriptor(4, 0, 0, 0)]


def test_a_prompts_pages_take_four_bytes_each_and_the_worst_eighteen():
    alike = PageList.of([PageDescriptor(0, 100 + i, 5 * i, 3) for i in range(1000)])
    assert len(alike.packed()) < 4 * 1000 + 32
    unlike = PageList.of([PageDescriptor(i % 2, 7 * i, 5 * i, i) for i in range(1000)])
    assert len(unlike.packed()) < 18 * 1000 + 32


@pytest.mark.parametrize(
    "descriptor", [PageDescriptor(0, -1, 0, 0), PageDescriptor(0, 0, 2**32, 0), PageDescriptor(2**16, 0, 0, 0)]
)
def test_a_number_that_does_not_fit_is_found_at_its_sender(descriptor):
    with pytest.raises(ProtocolError, match=r"Landed\.pages"):
        frames.pack(_landed([PageDescriptor(0, 0, 0, 0), descriptor]))
    with pytest.raises(ProtocolError, match=r"Landed\.pages"):
        frames.pack(_landed(7))


@pytest.mark.parametrize("cut", [0, 4, 5, 12, -1])
def test_bytes_that_are_no_list_are_refused(cut):
    data = PageList.of([PageDescriptor(0, i, 5 * i, i) for i in range(3)]).packed()
    with pytest.raises(ValueError, match="a list of"):
        PageList.unpack(data[:cut])
    with pytest.raises(ValueError, match="a list of"):
        PageList.unpack(data[:4] + b"\xff" + data[5:])
    with pytest.raises(ValueError, match="a list of"):
        PageList.unpack(b"\xff\xff\xff\xff" + data[4:])


def test_units_are_pairs_and_a_slice_of_them_is_too():
    units = [(PageDescriptor(0, i, 9 - i, 4), 20 + i) for i in range(5)]
    columns = UnitList.of(units)
    assert list(columns) == units and columns[2] == units[2] and list(columns[1:3]) == units[1:3]
    assert UnitList.of(columns) is columns and PageList.of(columns.src) is columns.src
