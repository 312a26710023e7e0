"""Prompts to ids, hashes and echoes, with tokenizers of both kinds; and what is refused before it is tokenized."""

import asyncio
import json
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_fakes import smollm2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from tailrace.kv_cache.block_hash import BlockHasher, namespace
from tailrace.model.errors import ClientError
from tailrace.model.tokenizer import from_hf_json
from tailrace.router.detokenize import TextStream, TokenTable
from tailrace.router.text_cuts import Cuts
from tailrace.router.token_cache import PromptTokenCache
from tailrace.router.tokenization import ChatPrompt, IdsPrompt, TextPrompt, Tokenization, scope_of
from tailrace.transfer.messages import unpack_ids

HASHER = BlockHasher(b"a secret of sixteen", 4)


def marked_spaces():
    """A SentencePiece-like tokenizer: BOS first, a dummy space, bytes where a character is unknown."""
    pieces = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefgh", "▁a", "ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "b")], byte_fallback=True, unk_token=None))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return from_hf_json(backend.to_str(), config, vocab_size=len(pieces), where="test")


def composing():
    """SmolLM2's, but normalizing to composed characters, as Qwen2 does."""
    backend = Tokenizer.from_str(smollm2().tokenizer.digest_text())
    backend.normalizer = normalizers.NFC()
    return from_hf_json(backend.to_str(), {}, vocab_size=smollm2().tokenizer.vocab_size, where="test")


def tokenization(tokenizer=None, template=None, **more):
    tokenizer = tokenizer or smollm2().tokenizer
    table = TokenTable(tokenizer)
    values = {"revision": "rev", "fidelity": "float32/exact", "vocab_size": tokenizer.vocab_size} | more
    return Tokenization(tokenizer, template, table, HASHER, **values)


async def prompt_of(source, limit=10_000, **more):
    work = more.pop("work", None) or tokenization()
    try:
        return await work.prompt(source, limit=limit, **more)
    finally:
        work.close()


async def test_hashes_are_of_the_full_blocks_in_the_requests_scope():
    ids = list(range(100, 110))
    prompt = await prompt_of(IdsPrompt(ids), tenant="t", cache_salt="s")
    scope = scope_of("rev", "t", "s")
    assert prompt.hashes == HASHER.hash_blocks(scope, ids) and len(prompt.hashes) == 32
    assert unpack_ids(prompt.packed) == ids
    assert prompt.namespace == namespace(scope, "float32/exact")
    assert prompt.hash_ids([*ids, 1, 2]).startswith(prompt.hashes) and len(prompt.hash_ids([*ids, 1, 2])) == 48


def test_no_two_scopes_are_spelled_alike():
    parts = [("r", "a", "b"), ("r", "a|b", ""), ("r", "", "a|b"), ("r", 'a","b', ""), ("r", "a", ""), ("r", "", "a")]
    assert len({scope_of(*part) for part in parts}) == len(parts)
    assert all(word not in scope_of("rev", "a-tenants-key", "salt") for word in ("rev", "a-tenants-key", "salt"))


async def test_bos_is_put_before_texts_and_never_before_templates():
    class Template:
        def render(self, messages, tools=None, add_generation_prompt=True):
            return "<s> a" + messages[0]["content"]

    work = tokenization(marked_spaces(), Template())
    text = await work.prompt(TextPrompt("ab"), limit=100)
    plain = await work.prompt(TextPrompt("ab", special=False), limit=100)
    chat = await work.prompt(ChatPrompt([{"role": "user", "content": "b"}]), limit=100)
    work.close()
    assert text.ids[0] == 0 and text.ids[1:] == plain.ids and 0 not in plain.ids
    assert list(chat.ids).count(0) == 1


async def test_without_a_template_chat_is_a_400():
    with pytest.raises(ClientError, match="no chat template"):
        await prompt_of(ChatPrompt([{"role": "user", "content": "a"}]), work=tokenization(template=None))


@pytest.mark.parametrize("text", ["ab a", " ab", "a😀b", "<s>ab", "</s>", "é"])
async def test_an_echo_is_the_prompt_as_sent_and_as_its_tokens_spell_it(text):
    for make in (marked_spaces, lambda: smollm2().tokenizer, composing):
        prompt = await prompt_of(TextPrompt(text, echo=True), work=tokenization(make()))
        assert prompt.echo.text == text and "".join(prompt.echo.pieces) == text
        assert len(prompt.echo.pieces) == len(prompt.ids) and prompt.echo.open_bytes == b""


async def test_an_echo_of_a_text_that_the_tokenizer_composes_keeps_both_spellings():
    prompt = await prompt_of(TextPrompt("e\u0301", echo=True), work=tokenization(composing()))
    assert prompt.echo.text == "e\u0301" and "".join(prompt.echo.pieces) == "\u00e9"


async def test_an_echo_of_ids_leaves_out_special_tokens_as_the_output_does():
    prompt = await prompt_of(IdsPrompt([0, *smollm2().tokenizer.encode("hi", special=False)], echo=True))
    assert prompt.echo.text == "hi" and prompt.echo.pieces == ("", "hi")


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab ▁é😀\n"), max_size=12))
def test_bytes_of_marked_space_tokens_are_the_decoded_text(text):
    """The stream is what decode gives, but for the one space that decode strips from the beginning of a text."""
    tokenizer = MARKED
    ids = tokenizer.encode(text, special=True)
    stream = TextStream(TokenTable(tokenizer))
    pieces = [piece for token in ids for piece in stream.push(token)] + stream.finish()
    streamed = "".join(piece.text for piece in pieces)
    decoded = tokenizer.decode(ids, skip_special=True)
    assert streamed in (decoded, " " + decoded)


MARKED = marked_spaces()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=12))
def test_a_stream_of_any_ids_is_what_decode_gives(ids):
    tokenizer = smollm2().tokenizer
    stream = TextStream(TABLE)
    pieces = [piece for token in ids for piece in stream.push(token)] + stream.finish()
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids, skip_special=True)


TABLE = TokenTable(smollm2().tokenizer)


class Counting:
    """A tokenizer of one token a character that remembers what it was asked."""

    vocab_size = 300
    special_ids = frozenset()
    bos_id = None

    def __init__(self):
        self.asked = []
        self.thread = None

    def id_to_bytes(self, token):
        return bytes([token % 256])

    def encode(self, text, *, special):
        self.asked.append(len(text))
        self.thread = threading.current_thread().name
        return [ord(c) % 256 for c in text]


async def test_a_text_that_is_surely_too_long_is_judged_by_its_bytes_or_its_beginning():
    counting = Counting()
    work = tokenization(counting)
    with pytest.raises(ClientError, match="the prompt has 100 tokens.*at most 100"):
        await work.prompt(TextPrompt("a" * 100), limit=100)
    assert counting.asked == [100]
    counting.asked.clear()
    with pytest.raises(ClientError, match=r"at least \d+ tokens.*at most 100"):
        await work.prompt(TextPrompt("a" * 100_000), limit=100)
    assert counting.asked == []  # a token has one byte here
    with pytest.raises(ClientError, match=r"at least \d+ tokens"):
        await tokenization_of_wide(counting).prompt(TextPrompt("a" * 100_000), limit=100)
    assert counting.asked == [8 * 99]
    work.close()


def tokenization_of_wide(counting):
    """The same, where one token might have very many bytes, so that bytes say nothing."""
    work = tokenization(counting)
    work._table.max_bytes = 10**6
    return work


async def test_long_prompts_wait_apart_from_short_ones():
    counting = Counting()
    work = tokenization(counting, threads=1)
    await work.prompt(TextPrompt("a"), limit=10**7)
    assert counting.thread.startswith("tokenize_")
    await work.prompt(TextPrompt("a" * 70_000), limit=10**7)
    assert counting.thread.startswith("tokenize-long")
    work.close()


@pytest.mark.alone
async def test_the_event_loop_runs_on_while_a_megabyte_is_tokenized():
    work = tokenization()
    task = asyncio.create_task(work.prompt(TextPrompt("The river turns below. " * 40_000), limit=10**7))
    longest = 0.0
    while not task.done():
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - started)
    assert len((await task).ids) > 100_000
    work.close()
    assert longest < 0.25  # blocked, it would be the half second and more that the whole job takes


class Instant:
    """As many ids as characters, in no time."""

    special_ids, bos_id, max_bytes = frozenset(), None, 1

    def encode(self, text, *, special):
        return [7] * len(text)

    def encode_parts(self, texts):
        return [[7] * len(text) for text in texts]


@pytest.mark.alone
@pytest.mark.parametrize("cached", [False, True])
def test_no_step_of_a_long_prompt_holds_the_interpreter_for_long(cached):
    """What one line does in C nobody else can do anything beside: CPU time of each line of the job, but for the
    tokenizer's, which lets go. Four million ids, so that to make them into bytes at once takes ten times the bound."""
    encoder, lines, clock = Instant(), {}, time.thread_time
    cache = PromptTokenCache(encoder, Cuts(r" (?=w)"), revision="r", max_bytes=1 << 20) if cached else None
    hasher = BlockHasher(b"a secret of sixteen", 4096)
    work = Tokenization(
        encoder, None, encoder, hasher, revision="r", fidelity="f", vocab_size=10, cache=cache
    )  # fmt: skip
    text = " ".join(f"w{n:08}" for n in range(400_000))
    last = [("", 0), clock()]

    def trace(frame, event, argument):
        now = clock()
        if event == "line" and "encode" not in last[0][0]:
            lines[last[0]] = max(lines.get(last[0], 0.0), now - last[1])
        last[0] = (frame.f_code.co_name, frame.f_lineno)
        last[1] = clock()
        return trace

    sys.settrace(trace)
    try:
        prompt = work._prompt(TextPrompt(text, special=False), 10**7, "scope")
    finally:
        sys.settrace(None)
    started = clock()
    size = len(prompt.ids)
    del prompt
    lines["freeing it", 0] = clock() - started
    work.close()
    assert size == len(text) == 3_999_999
    assert max(lines.values()) < 0.02, sorted(lines.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("ids", [[49152], [-1], [2**40]])
async def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ClientError, match=json.dumps(ids[0])):
        await prompt_of(IdsPrompt(ids))
