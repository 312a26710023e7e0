"""Reads of spans: the kernel (in Triton's interpreter) and its twin copy the same bytes and touch no others."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tailrace.kernels.device_memory import HANDLE_BYTES, CudaIpc, DeviceError, Memory
from tailrace.kernels.device_reads import CudaReader
from tailrace.kernels.page_read import UNITS, check_spans, read_spans, unit_of

KERNEL = """
import sys
import numpy as np
import torch
from tailrace.kernels.device_memory import Memory
from tailrace.kernels.page_read import read_spans as twin, unit_of
from tailrace.kernels import page_read_triton
rng = np.random.default_rng(0)
def memory(nbytes, seed):
    tensor = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))
    return Memory(tensor.data_ptr(), nbytes, tensor.device, keeps=tensor)
checked = 0
for page, unit in ((4096, 16), (96, 16), (80, 16), (16, 16), (100, 4), (6, 2), (24, 8), (7, 1), (3072 * 5 + 16, 16)):
    for n, programs, stages in ((1, 3, 1), (9, 1, 1), (30, 2, 3), (5, 64, 1)):
        src, a, b = memory(40 * page, 1), memory(40 * page, 2), memory(40 * page, 2)
        at, to = rng.integers(0, 40, n), rng.permutation(40)[:n]
        numbers = torch.from_numpy(np.stack((at, to)).astype(np.int32))
        twin(a, src, numbers, page // unit, page // unit, unit)
        shape = page_read_triton.Shape(tile_bytes=4096, stages=stages)
        page_read_triton.read_spans(b, src, numbers, page // unit, page // unit, unit, programs, shape)
        assert torch.equal(a.tensor, b.tensor), (page, unit, n, programs)
        expected = memory(40 * page, 2).tensor.view(40, page)
        expected[torch.from_numpy(to)] = src.tensor.view(40, page)[torch.from_numpy(at)]
        assert torch.equal(b.tensor.view(40, page), expected)
        checked += 1
src, a, b = (memory(4096, seed) for seed in (1, 2, 2))
parts = torch.tensor([[0, 3, 9], [5, 11, 2]], dtype=torch.int32)  # 5 of each 7 units
twin(a, src, parts, 5, 7, 16)
page_read_triton.read_spans(b, src, parts, 5, 7, 16, 2, page_read_triton.Shape(tile_bytes=256))
assert torch.equal(a.tensor, b.tensor) and torch.equal(b.tensor[560:640], src.tensor[:80])
assert torch.equal(b.tensor[640:672], memory(4096, 2).tensor[640:672]), "between two spans"
print(checked + 1, "equal")
"""


def host_memory(nbytes: int) -> Memory:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return Memory(tensor.data_ptr(), nbytes, tensor.device, keeps=tensor)


def test_the_kernel_copies_what_its_twin_does_and_nothing_else():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.stdout.strip() == "37 equal", result.stderr[-2000:]


def test_the_unit_of_a_read_divides_every_number_of_it():
    assert [unit_of(n) for n in (4096, 16, 24, 20, 6, 7)] == [16, 16, 8, 4, 2, 1]
    assert unit_of(4096, 8) == 8 and unit_of() == UNITS[0]


@pytest.mark.parametrize(
    ("numbers", "length", "stride", "unit"),
    [
        ([[0], [3]], 2, 1, 16),  # ends behind dst
        ([[7], [0]], 2, 1, 16),  # ends behind src
        ([[2], [0]], 2, 4, 16),
        ([[-1], [0]], 1, 1, 16),
        ([[0], [0]], 0, 1, 16),
        ([[0], [0]], 1, 0, 16),
        ([[0], [0]], 1, 1, 32),
        ([[0], [0]], 1 << 28, 1, 16),
        ([0, 0], 1, 1, 16),
        ([[0], [0], [0]], 1, 1, 16),
    ],
)
def test_spans_that_reach_outside_are_refused(numbers: list, length: int, stride: int, unit: int):
    dst, src = host_memory(64), host_memory(128)
    check_spans(dst, src, np.array([[6, 0], [2, 0]], np.int32), 2, 1, 16)
    with pytest.raises(ValueError):
        check_spans(dst, src, np.array(numbers, np.int32), length, stride, unit)


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return CudaIpc()


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 96, 4096, 65_536, 368_640])
@pytest.mark.parametrize("programs", [1, 24])
def test_the_kernel_on_a_gpu_copies_what_its_twin_does(cuda: CudaIpc, page: int, programs: int):
    pages = 301
    src, dst = cuda.allocate(pages * page), cuda.allocate(pages * page)
    src.tensor.copy_(torch.randint(0, 256, (pages * page,), dtype=torch.uint8))
    dst.tensor.fill_(0xEE)
    rng = np.random.default_rng(page)
    at, to = rng.integers(0, pages, 200), rng.permutation(pages)[:200]
    expected = dst.tensor.cpu().view(pages, page)
    expected[torch.from_numpy(to)] = src.tensor.cpu().view(pages, page)[torch.from_numpy(at)]
    torch.cuda.synchronize()
    reader = CudaReader(cuda.device, programs)
    ticket = reader.read(dst, src, (at, to), page // 16, page // 16, 16)
    torch.cuda.synchronize()
    assert ticket.done()
    assert torch.equal(dst.tensor.cpu().view(pages, page), expected)
    assert reader.fetch(dst, 0, page) == expected[0].numpy().tobytes()
    reader.store(dst, page, np.zeros(page, np.uint8))
    assert reader.fetch(dst, page, page) == bytes(page)
    for memory in (src, dst):
        cuda.close(memory)


@pytest.mark.gpu
def test_offsets_past_four_gigabytes_are_copied_from_where_they_point(cuda: CudaIpc):
    """2^31 words of four bytes lie below 8 GiB: an offset of 32 bits would wrap around."""
    nbytes, page = 9 << 30, 65_536
    src, dst = cuda.allocate(nbytes), cuda.allocate(nbytes)
    whole = nbytes // page
    src.tensor.view(whole, page)[[0, whole - 1]] = torch.randint(0, 256, (2, page), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    reader = CudaReader(cuda.device)
    numbers = torch.tensor([[whole - 1, 0], [0, whole - 1]], dtype=torch.int32, device="cuda")
    read_spans(dst, src, numbers, page // 16, page // 16, 16)
    torch.cuda.synchronize()
    for at, to in ((whole - 1, 0), (0, whole - 1)):
        assert reader.fetch(dst, to * page, page) == reader.fetch(src, at * page, page)
    for memory in (src, dst):
        cuda.close(memory)


@pytest.mark.gpu
def test_many_reads_under_way_do_not_share_the_room_for_their_numbers(cuda: CudaIpc):
    page, n = 65_536, 2000
    src, dst = cuda.allocate(n * page), cuda.allocate(n * page)
    src.tensor.view(torch.int64).random_()
    torch.cuda.synchronize()
    reader = CudaReader(cuda.device, 1)
    order = np.random.default_rng(0).permutation(n)
    tickets = [
        reader.read(dst, src, (order[low : low + 50], np.arange(low, low + 50)), page // 16, page // 16, 16)
        for low in range(0, n, 50)
    ]
    assert not tickets[-1].done()
    torch.cuda.synchronize()
    assert all(ticket.done() for ticket in tickets)
    assert torch.equal(dst.tensor.view(n, page), src.tensor.view(n, page)[torch.from_numpy(order).cuda()])
    for memory in (src, dst):
        cuda.close(memory)


@pytest.mark.gpu
def test_an_error_of_the_runtime_names_sizes_and_code_and_leaves_torch_alone(cuda: CudaIpc):
    _, total = cuda.room()
    with pytest.raises(DeviceError, match=rf"cudaMalloc of .* of {total} free.* 2, out of memory") as error:
        cuda.allocate(2 * total)
    assert error.value.is_full
    with pytest.raises(DeviceError, match="cudaIpcOpenMemHandle says"):
        cuda.open(bytes(HANDLE_BYTES), 4096)
    with pytest.raises(DeviceError, match="64 bytes, not 3"):
        cuda.open(b"abc", 4096)
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_without_a_gpu_there_is_no_provider_of_its_memory():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="no CUDA device"):
        CudaIpc()
