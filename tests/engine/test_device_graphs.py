"""Which steps run from a graph: sizes, variants, warning once. No GPU: graphs are fakes that count."""

import pytest

from tailrace.engine.device_graphs import VARIANTS, CaptureSizes, GraphBook, batch_sizes, token_counts
from tailrace.kernels import device_sampling


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 32)),
        (50, (1, 2, 4, 8, 16, 32, 48, 50)),
        (64, (1, 2, 4, 8, 16, 32, 48, 64)),
        (600, (1, 2, 4, 8, *range(16, 257, 16), 384, 512, 600)),
    ],
)
def test_derived_batch_sizes(most, sizes):
    assert batch_sizes(most) == sizes


@pytest.mark.parametrize(
    ("most", "counts"),
    [
        (1, (1,)),
        (100, (1, 2, 4, 8, 16, 32, 64, 100)),
        (128, (1, 2, 4, 8, 16, 32, 64, 128)),
        (512, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        (1000, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1000)),
    ],
)
def test_derived_token_counts_end_with_the_limit_once(most, counts):
    assert token_counts(most) == counts


def test_what_is_configured_is_taken_and_what_is_not_derived():
    sizes = CaptureSizes.derive(32, 256, rows=[16, 2, 2, 1], variants=["advanced", "greedy"])
    assert sizes.rows == (1, 2, 16) and sizes.variants == ("greedy", "advanced")
    assert CaptureSizes.derive(32, 256) == CaptureSizes(batch_sizes(32), token_counts(256), VARIANTS)
    assert CaptureSizes.derive(32, 4096, mixes=True).beside == token_counts(1024)


def test_a_step_is_padded_to_the_next_size_or_to_none():
    sizes = CaptureSizes((1, 2, 8), (4, 64), VARIANTS)
    assert [sizes.padded_rows(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]
    assert [sizes.padded_tokens(n) for n in (1, 4, 5, 64, 65)] == [4, 4, 64, 64, None]
    assert CaptureSizes((), (), ()).padded_rows(1) is None
    both = CaptureSizes((1, 8), (4, 64), VARIANTS, (4, 16))
    assert [both.padded_beside(*n) for n in ((1, 1), (8, 16), (9, 4), (3, 17))] == [(8, 4), (8, 16), None, None]
    assert sizes.padded_beside(1, 1) is None
    assert both.heads == (1, 8, 16) and both.padded_head(9) == 16 and sizes.padded_head(9) is None


def test_the_variants_are_those_of_the_sampler():
    assert VARIANTS == device_sampling.VARIANTS


def test_a_captured_key_is_replayed_and_any_other_runs_as_it_is():
    captured, replayed, ran = [], [], []

    def capture(run):
        run()
        captured.append(run)
        return lambda: replayed.append(run)

    book = GraphBook(capture)
    book.add("a", lambda: ran.append("a"))
    assert len(captured) == 1 and ran == ["a"]
    assert book.run("a", lambda: ran.append("again")) and ran == ["a"] and replayed == captured
    assert not book.run("b", lambda: ran.append("b")) and ran == ["a", "b"]
    assert not book.run(None, lambda: ran.append("none")) and ran == ["a", "b", "none"]
    assert (book.replayed, book.eager, len(book)) == (1, 2, 1)
    with pytest.raises(ValueError, match="captured already"):
        book.add("a", lambda: None)


def test_each_variant_is_told_once(caplog):
    book = GraphBook(lambda run: run)
    for variant in ("greedy", "advanced", "greedy", "greedy", "advanced"):
        book.tell_variant(variant)
    assert [r.fields["variant"] for r in caplog.records] == ["greedy", "advanced"]
