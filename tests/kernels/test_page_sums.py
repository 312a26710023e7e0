"""Page sums: the kernel (in Triton's interpreter), the plain twin and the host path give the same bits, and see what
they must see."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tailrace.kernels.page_sums import page_sums, slice_sums, weights, word_bytes

KERNEL = """
import sys
import torch
from tailrace.kernels.page_sums import page_sums as twin
from tailrace.kernels.page_sums_triton import page_sums
torch.manual_seed(0)
for dtype, shape in ((torch.float32, (2, 2, 3, 16, 8)), (torch.bfloat16, (1, 2, 1, 40, 32)),
                     (torch.float16, (2, 1, 2, 3, 5)), (torch.uint8, (1, 1, 2, 7, 9))):
    pool = torch.randint(0, 256, (6, *shape[:4], shape[4] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    pages = torch.tensor([5, 1, 1, 4])
    for tokens in (None, 1, shape[3] - 1):
        found = page_sums(pool, pages, tokens)
        assert torch.equal(found, twin(pool[pages], tokens)), (dtype, tokens)
print("equal")
"""


def random_pages(n: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    data = torch.randint(0, 256, (n, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return data.view(dtype)


def host_sums(pages: torch.Tensor, which: list[int], used: int) -> np.ndarray:
    row_bytes = pages.shape[-1] * pages.element_size()
    memory = pages.view(torch.uint8).view(len(pages), -1).numpy()
    return slice_sums(memory, which, row_bytes, pages.shape[-2], range(used))


def test_the_kernel_gives_the_bits_of_its_twin():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.stdout.strip() == "equal", result.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("used", [16, 5])
@pytest.mark.parametrize("dim", [64, 3])
def test_the_host_path_gives_the_bits_of_the_twin(dtype: torch.dtype, used: int, dim: int):
    torch.manual_seed(1)
    pages = random_pages(9, 2, 2, 3, 16, dim, dtype=dtype)
    which = [4, 8, 1, 2, 2]
    expected = page_sums(pages[which], used).reshape(len(which), -1)
    assert (host_sums(pages, which, used).view(np.int64) == expected.numpy()).all()


def test_the_sum_is_its_formula():
    words = np.arange(7, 7 + 2 * 4, dtype=np.uint32) * np.uint32(0x9ABCDEF)
    exact = [
        sum(int(x) * int(w) for x, w in zip(half, weights(4), strict=True)) % 2**64 for half in (words[:4], words[4:])
    ]
    assert slice_sums(words.view(np.uint8).reshape(1, -1), [0], 8, 2, range(2)).tolist() == [exact]


@pytest.mark.parametrize("flip", [1, 0x80, 0xFF])
def test_any_flipped_byte_changes_the_sum_of_its_slice_and_no_other(flip: int):
    torch.manual_seed(2)
    pages = random_pages(1, 2, 2, 1, 4, 8)
    data = pages.view(torch.uint8).view(-1)
    before = host_sums(pages, [0], 4)[0].copy()
    slice_bytes = 4 * 8 * 2
    for at in range(len(data)):
        data[at] ^= flip
        changed = np.flatnonzero(host_sums(pages, [0], 4)[0] != before)
        assert changed.tolist() == [at // slice_bytes]
        data[at] ^= flip


def test_two_flips_of_sign_bits_in_one_slice_do_not_cancel():
    torch.manual_seed(3)
    pages = random_pages(1, 1, 1, 1, 16, 8)
    data = pages.view(torch.uint8).view(-1)
    before = host_sums(pages, [0], 16)[0].copy()
    for other in range(7, len(data), 4):
        for at in (3, other):
            data[at] ^= 0x80
        assert (host_sums(pages, [0], 16)[0] != before).any()
        for at in (3, other):
            data[at] ^= 0x80


def test_rows_heads_fields_and_pages_that_changed_places_are_seen():
    torch.manual_seed(4)
    pages = random_pages(2, 2, 2, 2, 4, 8)
    sums = host_sums(pages, [0, 1], 4)
    for dims in ((0,), (1,), (2,), (3,), (4,), (5,)):
        assert (host_sums(pages.flip(dims).contiguous(), [0, 1], 4) != sums).all(), dims


def test_what_stands_behind_the_counted_tokens_does_not_matter():
    torch.manual_seed(5)
    pages = random_pages(1, 2, 2, 2, 4, 8)
    other = pages.clone()
    other[..., 3, :] = 0
    assert (host_sums(pages, [0], 3) == host_sums(other, [0], 3)).all()
    assert (host_sums(pages, [0], 4) != host_sums(other, [0], 4)).all()


def test_parts_with_the_weights_of_their_origin_add_up_to_the_sum_of_the_whole():
    """A page of 16 tokens that stands in pages of 8, from the middle of one on."""
    torch.manual_seed(6)
    page, small = random_pages(1, 2, 2, 1, 16, 8), random_pages(4, 2, 2, 1, 8, 8)
    small[1, ..., 5:, :], small[3], small[2, ..., :5, :] = (
        page[0, ..., :3, :], page[0, ..., 3:11, :], page[0, ..., 11:, :],
    )  # fmt: skip
    memory = small.view(torch.uint8).view(4, -1).numpy()
    parts = [(1, range(5, 8), 0), (3, range(8), 3), (2, range(5), 11)]
    found = sum(slice_sums(memory, [p], 16, 8, span, weight_from) for p, span, weight_from in parts)
    assert (found == host_sums(page, [0], 16)).all()


def test_words_fill_a_row_exactly():
    assert [word_bytes(n) for n in (128, 4, 6, 10, 3)] == [4, 4, 2, 2, 1]
