"""FP8 and FP4 safetensors read as torch and transformers read them; hostile files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tailrace.model import scaled_blocks
from tailrace.model.errors import ConfigError
from tailrace.model.hf_directory import stored_tensors
from tailrace.model.quantized import dense
from tailrace.model.safetensors_files import quantization_block
from tailrace.model.scaled_blocks import gathered_rows, integers
from tailrace.model.source import open_source
from tailrace.model.tensors import TensorEntry, TensorTable
from tailrace.model.weights import load_weights
from tests.checkpoints import write_tiny_checkpoint
from tests.quantized_checkpoints import V3, V4, V41, Style, write_quantized_checkpoint

MIXED = Style((32, 64), ue8m0=False, suffix=".weight_scale_inv", four_bit=r"experts", tables=r"embed\.weight$")
AS_BYTES = Style((32, 32), True, ".scale", V41.four_bit, V41.tables, (torch.uint8, torch.uint8))
STYLES = {"v3": V3, "v4": V4, "v41": V41, "mixed": MIXED, "bytes": AS_BYTES}

PROJ, EXPERT = "layers.1.attn.wq_a.weight", "layers.1.ffn.experts.0.w1.weight"
TABLE, NORM, IDS = "layers.1.engram.embed.weight", "layers.1.attn_norm.weight", "layers.1.ffn.gate.tid2eid"


def random_model(rows: int = 80, columns: int = 96) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> torch.Tensor:
        # Blocks of very different size, so that a scale read at another's place is seen.
        return torch.randn(*shape, generator=generator) * torch.exp(3 * torch.randn(*shape, generator=generator))

    return {
        PROJ: matrix(rows, columns),
        EXPERT: matrix(rows, columns),
        TABLE: matrix(rows, columns),
        NORM: matrix(columns).bfloat16(),
        IDS: torch.randint(0, 99, (50, 6), generator=generator),
    }


def table(directory: Path, expected: dict[str, tuple[int, ...]], block: tuple[int, int] | None) -> TensorTable:
    """What the directory holds, as the families' loaders see it, every shape checked."""
    tensors = stored_tensors(directory, block)
    for name, shape in expected.items():
        tensors.required(name, shape)
    return tensors


def opened(directory: Path, held: dict[str, torch.Tensor], block: tuple[int, int] | None) -> TensorTable:
    return table(directory, {name: tuple(t.shape) for name, t in held.items()}, block)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_quantized_checkpoint(tmp_path / "m", random_model(), {}, V41)
    return tmp_path / "m"


def reopened(directory: Path) -> TensorTable:
    return opened(directory, random_model(), V41.block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(80, 96), (128, 256), (1, 2), (129, 130), (33, 34)])
@pytest.mark.parametrize("style", STYLES)
def test_every_layout_is_read_as_it_was_written(
    tmp_path: Path, style: str, rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scaled_blocks, "_CHUNK_ELEMENTS", 7 * columns)  # chunks that end within a block
    held = write_quantized_checkpoint(tmp_path, random_model(rows, columns), {}, STYLES[style], shards=3)
    tensors = opened(tmp_path, held, STYLES[style].block)
    for name in (PROJ, EXPERT, TABLE, NORM):
        assert torch.equal(dense(tensors[name], dtype), held[name].to(dtype)), name
        part = slice(rows // 3, rows - rows // 4)
        assert torch.equal(dense(tensors[name], dtype, part), held[name][part].to(dtype)), name
    assert torch.equal(integers(tensors[IDS]), held[IDS])
    kinds = {"v3": "F8_E4M3"}.get(style, "F4_E2M1")
    assert [tensors[n].kind for n in (PROJ, EXPERT, TABLE, NORM)] == ["F8_E4M3", kinds, "F8_E4M3", "BF16"]


@pytest.mark.parametrize("style", ["v3", "v4", "v41", "bytes"])
def test_transformers_dequantizes_to_the_same_numbers(tmp_path: Path, style: str):
    held = write_quantized_checkpoint(tmp_path, random_model(256, 384), {}, STYLES[style])
    stored, tensors = load_file(tmp_path / "model.safetensors"), opened(tmp_path, held, STYLES[style].block)
    for name in (PROJ, EXPERT, TABLE):
        scales = stored[name.removesuffix(".weight") + STYLES[style].suffix]
        weight = stored[name].view(torch.int8) if stored[name].dtype == torch.uint8 else stored[name]
        theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.float32)
        assert torch.equal(dense(tensors[name], torch.float32), theirs), name


def test_all_bytes_of_both_formats_are_the_values_that_torch_and_the_standard_say(tmp_path: Path):
    every = torch.arange(256, dtype=torch.uint8)
    e4m3 = every.view(torch.float8_e4m3fn)
    numbers = e4m3.float().isfinite()
    e2m1 = [(-1) ** (code >> 3) * v for code in range(16) for v in ((0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7],)]
    scales = torch.tensor([[120, 127, 140, 1, 0, 127, 127, 127]], dtype=torch.uint8)
    stored = {
        "a.weight": e4m3[numbers].reshape(1, 254),
        "a.scale": scales.view(torch.float8_e8m0fnu),
        "b.weight": every.reshape(2, 128).view(torch.int8),
        "b.scale": torch.cat((scales, scales)).view(torch.float8_e8m0fnu),
    }
    save_file(stored, tmp_path / "model.safetensors")
    tensors = table(tmp_path, {"a.weight": (1, 254), "b.weight": (2, 256)}, (128, 128))
    by_column = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    expected = (e4m3[numbers].double() * by_column[:, :254]).float()
    assert torch.equal(dense(tensors["a.weight"], torch.float32), expected)
    pairs = torch.tensor([[e2m1[byte & 15], e2m1[byte >> 4]] for byte in range(256)], dtype=torch.float64)
    assert torch.equal(dense(tensors["b.weight"], torch.float32), (pairs.reshape(2, 256) * by_column).float())


def test_rows_are_gathered_in_any_order_and_none_outside(written: Path):
    held = write_quantized_checkpoint(written, random_model(), {}, V41)
    tensors, index = reopened(written), torch.tensor([[79, 0, 3], [3, 40, 79]])
    for name in (TABLE, EXPERT, PROJ):
        assert torch.equal(gathered_rows(tensors[name], index, torch.float32), held[name][index])
        for outside in (-1, 80, 1 << 40):
            with pytest.raises(IndexError, match=rf"{name} has 80 rows, not row {outside}"):
                gathered_rows(tensors[name], torch.tensor([4, outside]), torch.float32)
    assert gathered_rows(tensors[TABLE], torch.empty(0, dtype=torch.int64), torch.bfloat16).shape == (0, 96)


def test_a_row_of_a_table_of_twelve_gigabytes_costs_no_more_than_itself(tmp_path: Path):
    rows, columns = 45_000_000, 256
    sizes = {"t.weight": ("F8_E4M3", columns), "t.scale": ("F8_E8M0", columns // 32)}
    header, end = {}, 0
    for name, (kind, width) in sizes.items():
        header[name] = {"dtype": kind, "shape": [rows, width], "data_offsets": [end, end + rows * width]}
        end += rows * width
    text = json.dumps(header).encode()
    wanted = torch.tensor([rows - 1, 17, 20_000_003])
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # sparse: its zeros take no disk
        for row in wanted.tolist():
            file.seek(8 + len(text) + row * columns)
            file.write(bytes((np.arange(columns) % 100).astype(np.uint8)))
            file.seek(8 + len(text) + rows * columns + row * 8)
            file.write(bytes(range(120, 128)))
    process = psutil.Process()
    before = process.memory_info().rss
    entry = table(tmp_path, {"t.weight": (rows, columns)}, (32, 32))["t.weight"]
    found = gathered_rows(entry, wanted, torch.float32)
    assert process.memory_info().rss - before < 32 << 20
    values = (torch.arange(columns) % 100).to(torch.uint8).view(torch.float8_e4m3fn).float()
    expected = values * torch.exp2(torch.arange(-7, 1).float()).repeat_interleave(32)
    assert torch.equal(found, expected.expand(3, columns))


def test_a_qwen3_checkpoint_in_fp8_loads_as_what_it_says(tmp_path: Path):
    plain = write_tiny_checkpoint(tmp_path / "plain", "qwen3")
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    held = write_quantized_checkpoint(tmp_path / "fp8", tensors, config, V3)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / "fp8" / name).write_text((plain / name).read_text())
    weights = load_weights(open_source(str(tmp_path / "fp8")), dtype=torch.float32)
    layer, prefix = weights.layers[1], "model.layers.1."
    qkv = torch.cat([held[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
    x = torch.eye(qkv.shape[1])
    assert torch.equal(layer.qkv_proj(x), qkv.T)
    assert not torch.equal(layer.qkv_proj(x), torch.cat([tensors[f"{prefix}self_attn.{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(layer.down_proj(torch.eye(128)), held[f"{prefix}mlp.down_proj.weight"].T)


def test_two_directories_that_differ_in_scales_only_are_two_revisions(written: Path):
    before = reopened(written).digest()
    edit(written, lambda stored: stored[name_of_scale(PROJ)].view(torch.uint8).add_(1))
    assert reopened(written).digest() != before


# ------------------------------------------------------------------------------------------------------- hostile files


def name_of_scale(weight: str) -> str:
    return weight.removesuffix(".weight") + ".scale"


def edit(directory: Path, change) -> None:
    stored = load_file(directory / "model.safetensors")
    change(stored)
    save_file(stored, directory / "model.safetensors")


def refused(directory: Path, *words: str) -> None:
    """Opening, or else reading every tensor, raises ConfigError with all the words and the file's name."""
    with pytest.raises(ConfigError) as caught:
        tensors = reopened(directory)
        for name in (PROJ, EXPERT, TABLE, NORM):
            dense(tensors[name], torch.float32)
    assert [word for word in (*words, "model.safetensors") if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", [PROJ, EXPERT, TABLE])
def test_a_missing_scale_is_named(written: Path, name: str):
    edit(written, lambda stored: stored.pop(name_of_scale(name)))
    refused(written, f"tensor {name}", "has no scales", name_of_scale(name))
    entry = stored_tensors(written, V41.block)[name]
    for read in (lambda: dense(entry, torch.float32), lambda: gathered_rows(entry, torch.tensor([1]), torch.float32)):
        with pytest.raises(ConfigError, match="has no scales"):
            read()


def test_what_no_model_asks_for_may_be_unreadable(written: Path):
    def change(stored: dict[str, torch.Tensor]) -> None:
        stored["mtp.0.x.weight"] = torch.ones(3, 3).to(torch.float8_e4m3fn)
        stored["vision.y"] = torch.ones(3, dtype=torch.bool)

    edit(written, change)
    tensors = reopened(written)
    assert tensors["mtp.0.x.weight"].problem and tensors["vision.y"].problem
    assert not any(name.endswith(".scale") for name in tensors)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (PROJ, (3, 2), "(3, 3) for blocks of 32 x 32 or (80, 3) for blocks of 1 x 32"),
        (PROJ, (2, 3), "(3, 3) for"),
        (PROJ, (1, 1), "(3, 3) for"),
        (PROJ, (9,), "(3, 3) for"),
        (PROJ, (3, 3, 1), "(3, 3) for"),
        (EXPERT, (3, 3), "(80, 3) for blocks of 1 x 32"),
        (EXPERT, (80, 6), "(80, 3) for blocks of 1 x 32"),
        (EXPERT, (3, 80), "(80, 3) for blocks of 1 x 32"),
        (TABLE, (79, 3), "(80, 3) for blocks of 1 x 32"),
    ],
)
def test_scales_of_another_shape_are_refused_with_both_shapes(written: Path, name, shape, expected):
    scales = torch.ones(shape).to(torch.float8_e8m0fnu)
    edit(written, lambda stored: stored.update({name_of_scale(name): scales}))
    stored = (80, 48) if name == EXPERT else (80, 96)
    refused(written, f"tensor {name}", str(stored), name_of_scale(name), str(shape), expected)


@pytest.mark.parametrize("byte", [255])
@pytest.mark.parametrize("name", [PROJ, EXPERT, TABLE])
def test_a_ue8m0_scale_that_is_no_number_is_named(written: Path, name: str, byte: int):
    def change(stored: dict[str, torch.Tensor]) -> None:
        stored[name_of_scale(name)].view(torch.uint8)[-1, 1] = byte

    edit(written, change)
    last = 2 if name == PROJ else 79
    refused(written, f"scale {name_of_scale(name)}", f"no finite number at [{last}, 1]", "(80, 96)")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float32_scale_that_is_no_number_is_named(tmp_path: Path, value: float):
    held = write_quantized_checkpoint(tmp_path, {PROJ: torch.randn(40, 40)}, {}, V3)
    edit(tmp_path, lambda stored: stored["layers.1.attn.wq_a.weight_scale_inv"].fill_(value))
    with pytest.raises(ConfigError, match=r"weight_scale_inv \(1, 1\).* \(40, 40\) is no finite number at \[0, 0\]"):
        dense(opened(tmp_path, held, (128, 128))[PROJ], torch.float32)


def test_a_value_that_is_no_number_is_named_and_other_rows_can_be_read(written: Path):
    def change(stored: dict[str, torch.Tensor]) -> None:
        stored[PROJ].view(torch.uint8)[70, 95] = 0xFF

    edit(written, change)
    refused(written, f"tensor {PROJ}", "is no number at [70, 95]")
    assert dense(reopened(written)[PROJ], torch.float32, slice(0, 70)).isfinite().all()


def test_a_product_beyond_float32_is_refused(written: Path):
    edit(written, lambda stored: stored[name_of_scale(EXPERT)].view(torch.uint8).fill_(254))
    refused(written, f"tensor {EXPERT}", "beyond float32 at [")


def test_scales_under_two_names_are_refused(written: Path):
    other = f"{PROJ}_scale_inv"
    edit(written, lambda stored: stored.update({other: torch.ones(3, 3)}))
    refused(written, f"tensor {PROJ}", other, "as well")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_scales_beside_a_weight_that_needs_none_are_refused(written: Path, dtype: torch.dtype):
    edit(written, lambda stored: stored.update({PROJ: torch.ones(80, 96, dtype=dtype)}))
    refused(written, f"tensor {PROJ}", "supported: F8_E4M3, I8, U8 with scales")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn])
def test_scales_of_a_type_that_has_no_meaning_are_refused(written: Path, dtype: torch.dtype):
    edit(written, lambda stored: stored.update({name_of_scale(PROJ): torch.ones(3, 3).to(dtype)}))
    refused(written, f"tensor {PROJ}", name_of_scale(PROJ), "with scales F32, F8_E8M0, U8")


def test_a_quantized_tensor_that_is_no_matrix_is_refused(written: Path):
    stacked = {PROJ: torch.ones(2, 80, 96).to(torch.float8_e4m3fn)}
    edit(written, lambda stored: stored.update(stacked))
    refused(written, f"tensor {PROJ}", "(2, 80, 96)", "is no matrix")


def test_a_type_that_nothing_uses_is_named_only_where_it_is_needed(written: Path):
    edit(written, lambda stored: stored.update({"extra": torch.ones(3, dtype=torch.float64)}))
    reopened(written)
    edit(written, lambda stored: stored.update({NORM: torch.ones(96, dtype=torch.float64)}))
    refused(written, f"tensor {NORM}", "type F64", "supported: F32, F16, BF16")


def test_a_table_of_numbers_is_not_taken_for_floats(written: Path):
    entry = reopened(written)[NORM]
    with pytest.raises(ConfigError, match=r"type BF16, expected I64 or I32"):
        integers(entry)
    edit(written, lambda stored: stored.update({IDS: stored[IDS].to(torch.int32)}))
    assert torch.equal(integers(reopened(written)[IDS]), random_model()[IDS])


def test_data_cut_short_is_refused_whatever_tensor_it_hits(written: Path):
    path = written / "model.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    for cut in (size, size + 1, (size + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        refused(written)


@pytest.mark.parametrize("wins", [0, 1])
def test_of_a_tensor_in_two_files_the_one_that_the_index_names_counts(tmp_path: Path, wins: int):
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, file in enumerate(files):
        save_file({"a": torch.full((2,), float(number)), f"own{number}": torch.ones(1)}, tmp_path / file)
    weight_map = {"own0": files[0], "own1": files[1], "a": files[wins]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tensors = stored_tensors(tmp_path)
    assert sorted(tensors) == ["a", "own0", "own1"]
    assert dense(tensors["a"], torch.float32).tolist() == [wins, wins]


def test_a_shape_that_does_not_fit_the_model_names_the_file_that_holds_it(tmp_path: Path):
    held = write_quantized_checkpoint(tmp_path, random_model(), {}, V41, shards=2)
    wanted = {name: tuple(t.shape) for name, t in held.items()} | {EXPERT: (80, 48)}
    match = rf"model-0000\d-of-00002\.safetensors: tensor {EXPERT} has shape \(80, 96\), expected \(80, 48\)"
    with pytest.raises(ConfigError, match=match):
        table(tmp_path, wanted, V41.block)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq"}, "(awq) is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "(fp8 e5m2) is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128.5]}, "weight_block_size is [128, 128.5]"),
        ({"quant_method": "fp8", "weight_block_size": [128, True]}, "weight_block_size is [128, True]"),
        ("fp8", "(?) is not supported"),
    ],
)
def test_quantization_that_cannot_be_read_is_refused(settings: object, words: str):
    with pytest.raises(ConfigError) as caught:
        quantization_block({"quantization_config": settings}, "some/config.json")
    assert words in str(caught.value) and str(caught.value).startswith("some/config.json: quantization_config")


def test_a_config_without_quantization_has_no_blocks_and_group_scales_are_still_read(tmp_path: Path):
    assert quantization_block({}, "here") is None
    held = write_quantized_checkpoint(tmp_path, {TABLE: torch.randn(70, 64)}, {}, V41)
    entry = opened(tmp_path, held, None)[TABLE]
    assert isinstance(entry, TensorEntry)
    assert torch.equal(dense(entry, torch.float32), held[TABLE])
