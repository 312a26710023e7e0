"""The prompt-token cache gives exactly the ids of plain tokenization, keeps its bounds, and is shared by processes."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_fakes import smollm2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.model.tokenizer import Tokenizer as OurTokenizer
from tailrace.model.tokenizer import from_hf_json
from tailrace.router import word_ids
from tailrace.router.detokenize import TokenTable
from tailrace.router.text_cuts import PART_CHARS, Cuts, exact_cuts
from tailrace.router.token_cache import PromptTokenCache
from tailrace.router.token_store import ROW_BYTES, TokenStore
from tailrace.router.tokenization import TextPrompt, Tokenization
from tailrace.router.word_ids import MAX_NEW_WORDS, MAX_WORD_CHARS, WordIds

WORDS = (
    "the of and a in to is was he for it with as his on be at by i this had not are but from or have an they which one"
)
TEXT = (
    " ".join(random.Random(3).choices(WORDS.split(), k=6000))
    + "\nnumbers 1234 5678\n你好 世界\ndef f(x):\n    return x\n"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(split, *, normalizer=None, added=(), vocab=800):
    """A byte-level tokenizer whose merges come from a text; `split`: a pattern, None for GPT-2's, "" for no split."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level]) if split else byte_level
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_tokens([AddedToken("<|end|>", special=True, normalized=False), *added])
    bos = backend.token_to_id("<|end|>")
    backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", bos)])
    size = backend.get_vocab_size(with_added_tokens=True)
    return from_hf_json(backend.to_str(), {"bos_token": "<|end|>"}, vocab_size=size, where="test")


MAKE = {
    "smollm2": lambda: smollm2().tokenizer,
    "gpt2": lambda: trained(None),
    "llama3": lambda: trained(LLAMA3),
    "o200k": lambda: trained(O200K),
    "composing": lambda: trained(LLAMA3, normalizer=normalizers.NFC()),
}


@cache
def tokenizer_of(name: str) -> OurTokenizer:
    return MAKE[name]()


@cache
def cuts_of(name: str) -> Cuts:
    cuts = exact_cuts(tokenizer_of(name), tokenizer_of(name).added_tokens())
    assert cuts is not None
    return cuts


PIECES = st.sampled_from(
    [
        "ab cd",
        "The",
        " of",
        "b\nc",
        "你\n好",
        "1234",
        " ",
        "\n",
        "\r\n",
        "é",
        "e\u0301",
        "😀",
        "'ll",
        "!\n/x",
        "<|end|>",
        "<|im_end|>",
        "\t",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=25).map("".join)


def cache_of(name: str = "smollm2", max_bytes: int = 1 << 24, **more) -> PromptTokenCache:
    return PromptTokenCache(tokenizer_of(name), cuts_of(name), revision="r", max_bytes=max_bytes, **more)


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, least=st.integers(1, 9))
def test_a_text_in_parts_has_exactly_the_ids_of_the_whole(name, text, least):
    tokenizer, cuts = tokenizer_of(name), cuts_of(name)
    parts = list(cuts.parts(text, least))
    assert "".join(parts) == text
    assert sum(tokenizer.encode_parts(parts), []) == tokenizer.encode(text, special=False)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("special", [False, True])
def test_growing_texts_through_one_cache_have_the_ids_of_plain_tokenization(name, special):
    cache, rng, text = cache_of(name), random.Random(1), ""
    for turn in range(12):
        start = rng.randrange(len(TEXT) - 3000)
        text += f"<|end|>user {turn}\n{TEXT[start : start + rng.randrange(50, 3000)]}<|end|>\n"
        assert list(cache.encode(text, special=special)) == tokenizer_of(name).encode(text, special=special)
    assert cache.counts.hit_chars > cache.counts.chars * 0.6


def random_merges(seed: int) -> OurTokenizer:
    """A byte-level BPE whose merges are drawn at random, those that no text could need among them."""
    rng, alphabet = random.Random(seed), sorted(pre_tokenizers.ByteLevel.alphabet())
    common = [letter for letter in alphabet if letter.isascii() and letter.isalnum()] + ["Ġ", "Ċ"]
    vocab, merges = {letter: i for i, letter in enumerate(alphabet)}, []
    words = list(common)
    while len(vocab) < 700:
        pair = (rng.choice(words), rng.choice(words))
        if pair[0] + pair[1] in vocab or any(sign in pair[1] for sign in "ĠĊ"):
            continue  # a space or line feed only begins a token, as pre-tokenizers split
        vocab[pair[0] + pair[1]] = len(vocab)
        merges.append(pair)
        words.append(pair[0] + pair[1])
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return from_hf_json(backend.to_str(), {}, vocab_size=len(vocab), where="test")


@pytest.mark.parametrize("seed", range(6))
def test_merges_drawn_at_random_change_nothing_either(seed):
    tokenizer, rng = random_merges(seed), random.Random(seed)
    cuts = exact_cuts(tokenizer)
    assert cuts is not None
    cache = PromptTokenCache(tokenizer, cuts, revision=str(seed), max_bytes=1 << 22)
    letters = "abcdefghijXYZ012 \n\n  .,'é你😀"
    text = ""
    for _ in range(8):
        text += "".join(rng.choices(letters, k=rng.randrange(1, 1500)))
        assert list(cache.encode(text, special=False)) == tokenizer.encode(text, special=False)
        for least in (1, 2, 7):
            assert sum(tokenizer.encode_parts(list(cuts.parts(text, least))), []) == tokenizer.encode(
                text, special=False
            )


def test_text_without_any_place_to_cut_is_one_part():
    cache = cache_of()
    for text in ("x" * 5000, "你好" * 3000, "\n" * 4000, "1 2 " * 2000):
        assert list(cache.encode(text, special=False)) == tokenizer_of("smollm2").encode(text, special=False)


def test_tokenizers_that_a_cut_would_change_are_found_out():
    """A dummy space; tokens over two words; an added token that holds, or swallows what stands at, a place."""
    sentence_piece = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3}, [("▁", "a")]))
    sentence_piece.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    sentence_piece.decoder = decoders.Sequence([decoders.Replace("▁", " ")])
    prepending = from_hf_json(sentence_piece.to_str(), {}, vocab_size=4, where="test")
    assert exact_cuts(prepending) is None
    over_words = trained("", vocab=1200)
    crossing = [t for t in range(over_words.vocab_size) if b"e " in over_words.id_to_bytes(t)]
    assert crossing, "the test's tokenizer has no token over two words"
    cuts = exact_cuts(over_words, over_words.added_tokens())
    assert cuts is None or not cuts.places("the cat")
    holding = trained(LLAMA3, added=[AddedToken("two words", special=True, normalized=False)])
    cuts = exact_cuts(holding, holding.added_tokens())
    assert cuts is None or not cuts.places("two words")
    swallowing = trained(LLAMA3, added=[AddedToken("sep", special=True, normalized=False, rstrip=True)])
    cuts = exact_cuts(swallowing, swallowing.added_tokens())
    assert cuts is None or not cuts.places("sep ab")


def test_two_models_share_no_entry_in_one_store(tmp_path):
    store = TokenStore(tmp_path / "tokens", 1 << 22)
    for name, revision in (("smollm2", "one"), ("llama3", "two")):
        tokens = PromptTokenCache(tokenizer_of(name), cuts_of(name), revision=revision, max_bytes=1 << 22, store=store)
        assert list(tokens.encode(TEXT, special=False)) == tokenizer_of(name).encode(TEXT, special=False)
    store.close()


# ---------------------------------------------------------------------------------------------------------------- words


class CountingEncoder:
    """A tokenizer that tells what it was given."""

    def __init__(self, name: str = "smollm2") -> None:
        self._tokenizer = tokenizer_of(name)
        self.texts: list[str] = []

    def encode(self, text: str, *, special: bool) -> list[int]:
        self.texts.append(text)
        return self._tokenizer.encode(text, special=special)

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        self.texts += texts
        return self._tokenizer.encode_parts(texts)


@cache
def words_of(name: str) -> WordIds:
    return WordIds(tokenizer_of(name), cuts_of(name))


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=80, deadline=None)
@given(text=TEXTS, start=st.integers(0, 9000), length=st.integers(0, 400))
def test_ids_are_those_of_plain_tokenization_whatever_was_seen_before(name, text, start, length):
    """One memory for all examples, so that words come known, new and too many."""
    for whole in (text, text + TEXT[start : start + length] + text):
        assert words_of(name).encode(whole) == tokenizer_of(name).encode(whole, special=False)


def test_a_text_of_known_words_needs_no_tokenizer():
    encoder = CountingEncoder()
    words = WordIds(encoder, cuts_of("smollm2"))
    first = "the man of the house was on the hill"
    assert words.encode(first) == words.encode(first)
    assert sorted(encoder.texts) == sorted({"the", " man", " of", " the", " house", " was", " on", " hill"})
    encoder.texts.clear()
    assert words.encode("the hill was of man on the house") == tokenizer_of("smollm2").encode(
        "the hill was of man on the house", special=False
    )
    assert not encoder.texts


def test_a_text_of_many_new_words_is_tokenized_as_a_whole_and_a_few_of_them_are_learnt():
    encoder = CountingEncoder()
    words = WordIds(encoder, cuts_of("smollm2"))
    rng = random.Random(5)
    text = " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(100))
    assert words.encode(text) == tokenizer_of("smollm2").encode(text, special=False)
    assert len(words) == MAX_NEW_WORDS and encoder.texts.count(text) == 1
    assert len(encoder.texts) == MAX_NEW_WORDS + 1


def test_memory_is_bounded_in_words_and_in_their_length(monkeypatch):
    monkeypatch.setattr(word_ids, "MAX_WORDS", 40)
    encoder = CountingEncoder()
    words = WordIds(encoder, cuts_of("smollm2"))
    for number in range(30):
        words.encode(" ".join("".join(random.Random(number * 9 + i).choices("abcdefgh", k=7)) for i in range(9)))
        assert len(words) <= 40 + MAX_NEW_WORDS
    words = WordIds(encoder, cuts_of("smollm2"))
    long = "x" * (MAX_WORD_CHARS + 1)
    assert words.encode(long) == words.encode(long) == tokenizer_of("smollm2").encode(long, special=False)
    assert len(words) == 0
    assert words.encode("") == []


# --------------------------------------------------------------------------------------------------------------- bounds


def test_memory_stays_within_its_bound_and_the_newest_is_kept():
    cache = cache_of(max_bytes=40_000)
    for at in range(0, 20_000, 2500):
        cache.encode(TEXT[at : at + 5000], special=False)
        assert cache.num_bytes() <= 40_000
    hits = cache.counts.hit_chars
    cache.encode(TEXT[17_500:22_500], special=False)
    assert cache.counts.hit_chars - hits == len(TEXT[17_500:22_500])


def test_threads_at_once_get_the_right_ids_and_the_bytes_add_up():
    cache, wrong = cache_of(max_bytes=60_000), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            start = rng.randrange(0, 15_000, 500)
            text = TEXT[start : start + 6000]
            if list(cache.encode(text, special=False)) != tokenizer_of("smollm2").encode(text, special=False):
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.num_bytes() == sum(200 + 4 * len(ids) for ids in cache._known.values()) <= 60_000


# ---------------------------------------------------------------------------------------------------------------- store


def test_a_second_process_finds_what_the_first_has_tokenized(tmp_path):
    path = tmp_path / "tokens"
    first = cache_of(store=TokenStore(path, 1 << 22))
    ids = first.encode(TEXT, special=True)
    second = cache_of(store=TokenStore(path, 1 << 22))
    assert second.encode(TEXT, special=True) == ids
    assert second.counts.hit_chars == len(TEXT)


FILL = """
import random, sys
from pathlib import Path
from tailrace.router.token_store import TokenStore
store, rng = TokenStore(Path(sys.argv[1]), 60_000), random.Random(sys.argv[2])
for _ in range(60):
    keys = [rng.randrange(200).to_bytes(16, "big") for _ in range(8)]
    found = store.find(keys)
    store.add({key: bytes(4 * (1 + key[-1] % 200)) for key in keys if key not in found}, list(found))
store.close()
"""


def test_writers_that_race_keep_the_account_equal_to_what_is_there(tmp_path):
    path = tmp_path / "tokens"
    keeper = TokenStore(path, 60_000)  # so that no writer is the last
    writers = [subprocess.Popen([sys.executable, "-c", FILL, str(path), str(seed)]) for seed in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    accounted, actual = keeper.size()
    keeper.close()
    assert accounted == actual and 0 < actual <= 60_000


def test_metrics_tell_hits_tokens_by_source_bytes_and_evictions(tmp_path):
    from tailrace.transfer.metrics import Metrics

    metrics = Metrics("ingress", "i", "m")
    path, name = tmp_path / "tokens", "tailrace_prompt_cache"
    first = cache_of(max_bytes=1 << 22, store=TokenStore(path, 16_000))
    ids = first.encode(TEXT, special=False)
    first.measure(metrics)
    assert metrics.value(f"{name}_tokens_total", source="fresh") == len(ids)
    assert metrics.value(f"{name}_prompts_total", result="miss") == 1
    assert metrics.value(f"{name}_bytes", tier="memory") == first.num_bytes() > 4 * len(ids)
    assert metrics.value(f"{name}_evictions_total", tier="memory") == 0
    assert metrics.value(f"{name}_evictions_total", tier="store") > 0  # TEXT takes more than 16,000 bytes
    assert metrics.value(f"{name}_bytes", tier="store") == first._store.size()[1]
    first.encode(TEXT, special=False)
    first.measure(metrics)
    assert metrics.value(f"{name}_tokens_total", source="memory") == len(ids)
    assert metrics.value(f"{name}_prompts_total", result="hit") == 1
    other, reads = Metrics("ingress", "j", "m"), cache_of(max_bytes=9_000, store=TokenStore(path, 16_000))
    assert reads.encode(TEXT, special=False) == ids
    reads.measure(other)
    stored = other.value(f"{name}_tokens_total", source="store")
    assert stored > 0 and stored + other.value(f"{name}_tokens_total", source="fresh") == len(ids)
    assert other.value(f"{name}_evictions_total", tier="memory") > 0
    first.close()
    reads.close()


def test_the_least_recently_used_rows_go_first(tmp_path):
    store = TokenStore(tmp_path / "tokens", 10 * (ROW_BYTES + 400))
    keys = [bytes([i]) * 16 for i in range(12)]
    for key in keys[:10]:
        store.add({key: bytes(400)})
    store.add({}, [keys[0]])
    store.add({keys[10]: bytes(400), keys[11]: bytes(400)})
    left = store.find(keys)
    store.close()
    assert keys[0] in left and keys[11] in left and keys[1] not in left and keys[2] not in left


def test_a_store_that_another_process_holds_is_passed_over(tmp_path):
    path = tmp_path / "tokens"
    holder, store = TokenStore(path, 1 << 20), TokenStore(path, 1 << 20)
    holder._db.execute("BEGIN EXCLUSIVE")
    cache = cache_of(store=store)
    start = time.perf_counter()
    assert list(cache.encode(TEXT, special=False)) == tokenizer_of("smollm2").encode(TEXT, special=False)
    assert time.perf_counter() - start < 2
    holder._db.execute("ROLLBACK")
    holder.close()
    store.close()


def test_a_long_chats_next_turn_is_at_least_ten_times_faster_through_the_cache():
    """Best of three each, in one run; a chat of about 32,000 tokens."""
    tokenizer, cache = tokenizer_of("smollm2"), cache_of(max_bytes=1 << 26)
    chat = ("<|im_start|>user\n" + TEXT + "<|im_end|>\n") * 6
    assert len(cache.encode(chat, special=False)) > 32_000
    plain, cached = [], []
    for turn in range(3):
        chat += f"<|im_start|>assistant\n{TEXT[turn * 100 : turn * 100 + 900]}<|im_end|>\n"
        start = time.perf_counter()
        expected = tokenizer.encode(chat, special=False)
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert list(cache.encode(chat, special=False)) == expected
        cached.append(time.perf_counter() - start)
    assert min(plain) / min(cached) >= 10


def test_a_part_ends_at_the_first_place_after_its_least_length():
    cuts = Cuts(r"(?<=[A-Za-z])(?= [A-Za-z])")
    assert list(cuts.parts("aa bb cc dd", 4)) == ["aa bb", " cc dd"]
    assert [len(part) >= PART_CHARS for part in cuts.parts(TEXT)][:-1] == [True] * (len(list(cuts.parts(TEXT))) - 1)


async def test_prompts_are_tokenized_through_the_cache():
    tokenizer, tokens = tokenizer_of("smollm2"), cache_of()
    hasher = BlockHasher(b"a secret of sixteen", 64)
    work = Tokenization(
        tokenizer, None, TokenTable(tokenizer), hasher,
        revision="r", fidelity="f", vocab_size=tokenizer.vocab_size, cache=tokens,
    )  # fmt: skip
    for special in (True, False):
        prompt = await work.prompt(TextPrompt(TEXT, special=special), limit=100_000)
        assert list(prompt.ids) == tokenizer.encode(TEXT, special=special)
    work.close()
    assert tokens.counts.hit_chars == len(TEXT)


def test_nobody_else_may_read_a_store(tmp_path):
    store = TokenStore(tmp_path / "tokens", 1 << 20)
    store.add({b"k" * 16: b"1234"})
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600} and len(list(tmp_path.iterdir())) > 1
    store.close()


def test_the_last_to_close_a_store_removes_its_file(tmp_path):
    path = tmp_path / "tokens"
    first, second = TokenStore(path, 1 << 20), TokenStore(path, 1 << 20)
    first.add({b"k" * 16: b"1234"})
    first.close()
    assert second.find([b"k" * 16])
    second.close()
    assert not list(tmp_path.iterdir())
