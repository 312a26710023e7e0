"""Prompts to ids and block hashes, off the event loop: a long prompt must not hold up the streams of the others.

A job runs in a thread: render the template, tokenize, pack, hash the full blocks, cut the text of an echo. Short and
long prompts wait in different queues, so a short one never stands behind a megabyte; a quite short one that is alone in
its request is done on the loop. What is certainly over the limit is refused from its byte count, or from its beginning,
before it is tokenized whole.

Knows the tokenizer and the chat template of one model, nothing of requests or workers. Threads die with the process.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from tailrace.kv_cache.block_hash import BlockHasher, namespace
from tailrace.model.errors import ClientError
from tailrace.router.detokenize import TokenTable, Vocabulary
from tailrace.router.sampling import check_ids, prompt_too_long
from tailrace.router.token_cache import PromptTokenCache
from tailrace.transfer.messages import pack_ids
from tailrace.transfer.metrics import Metrics

LONG_CHARS = 65_536
SHORT_CHARS, SHORT_CHAT = 2048, 16  # characters and messages that are tokenized in half a millisecond
# Unicode normalization may make three bytes of one; a prompt is refused by its bytes only beyond that.
NORMALIZED_BYTES_PER_BYTE = 4
# A prompt this many times longer (in characters) than the limit (in tokens) is first judged by its beginning.
GLANCE_CHARS_PER_TOKEN = 8
GLANCE_SLACK_TOKENS = 64  # tokens at the cut that the whole text might have merged differently

SLICE_IDS = 16_384
SCOPES_KEPT = 256

T = TypeVar("T")


class Encoder(Vocabulary, Protocol):
    """The tokenizer (model/tokenizer.py) as the ingress uses it."""

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...


class Template(Protocol):
    """The chat template (model/chat.py)."""

    text: str
    reads_tools: bool

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """`special`: put what the model expects before a text (BOS). `param`: the field it came from."""

    text: str
    param: str = "prompt"
    special: bool = True
    echo: bool = False


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    ids: list[int]
    param: str = "prompt"
    echo: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    param: str = "messages"
    tools: tuple[dict[str, Any], ...] = ()  # that the template is told of


PromptSource = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt given back: `text` as it was sent, `pieces` as its tokens spell it (they differ where the tokenizer
    normalizes Unicode). `open_bytes`: an incomplete character at the end, which the output may complete."""

    text: str
    pieces: tuple[str, ...]
    open_bytes: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request needs of its prompt. `packed`: the ids as frames carry them. `hash_ids` hashes the full blocks of
    any ids in the prompt's scope."""

    ids: Sequence[int]
    packed: bytes
    hashes: bytes
    namespace: bytes
    hash_ids: Callable[[Sequence[int]], bytes]
    echo: Echo | None = None
    scope: str = ""


@lru_cache(SCOPES_KEPT)
def scope_of(revision: str, tenant: str, cache_salt: str) -> str:
    """Prompts share pages only within one scope. JSON keeps the three parts apart whatever they contain.

    A digest of them, because workers get it to name blocks of output, and a tenant may be its API key.
    """
    return hashlib.sha256(json.dumps([revision, tenant, cache_salt]).encode()).hexdigest()


class Tokenization:
    """The threads, and what they need.

    Args:
        revision: hash of the model (config, weights, tokenizer), part of every scope.
        fidelity: storage class of exact pages, e.g. `bfloat16/exact`; with the scope it names the index.
        threads: for short prompts; long ones have one more.
        cache: of this encoder, or None.
    """

    def __init__(
        self, encoder: Encoder, template: Template | None, table: TokenTable, hasher: BlockHasher, *,
        revision: str, fidelity: str, vocab_size: int, threads: int = 2, cache: PromptTokenCache | None = None,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._encode: Callable[..., Sequence[int]] = encoder.encode if cache is None else cache.encode
        self._encoder, self._template, self._table, self._hasher = encoder, template, table, hasher
        self._revision, self._fidelity, self._vocab_size = revision, fidelity, vocab_size
        self._short = ThreadPoolExecutor(threads, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._cache is not None:
            self._cache.close()

    def measure(self, metrics: Metrics) -> None:
        """Bring this process's metrics of the prompt-token cache up to date."""
        if self._cache is not None:
            self._cache.measure(metrics)

    async def prompt(
        self, source: PromptSource, *, limit: int, tenant: str = "", cache_salt: str = "", alone: bool = False
    ) -> Prompt:
        """Tokenize and hash; raises ClientError if the prompt is empty, unknown or over `limit` tokens.

        `alone`: its request has no other prompt. Then a short one is done here and now: that takes the event loop less
        time than the way to a thread and back.
        """
        scope = scope_of(self._revision, tenant, cache_salt)
        size = size_of(source)
        if alone and size <= SHORT_CHARS and (not isinstance(source, ChatPrompt) or len(source.messages) <= SHORT_CHAT):
            return self._prompt(source, limit, scope)
        return await self.run(lambda: self._prompt(source, limit, scope), size)

    async def ids(self, source: PromptSource, *, limit: int) -> Sequence[int]:
        """The ids alone (/tokenize)."""
        return await self.run(lambda: self._ids(source, limit), size_of(source))

    async def run(self, job: Callable[[], T], size: int) -> T:
        """Run a job of about `size` characters in the threads."""
        pool = self._long if size > LONG_CHARS else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, job)

    # -------------------------------------------------------------------------------------------------- in the threads

    def _prompt(self, source: PromptSource, limit: int, scope: str) -> Prompt:
        ids = self._ids(source, limit - 1)
        if not ids:
            raise ClientError(f"{source.param}: the prompt has no tokens", param=source.param, code="invalid_value")
        hasher = self._hasher
        echo = None if isinstance(source, ChatPrompt) or not source.echo else self._echo(source, ids)
        return Prompt(
            ids=ids,
            packed=pack_ids(ids),  # of an array a mere copy
            hashes=hasher.hash_blocks(scope, ids),
            namespace=namespace(scope, self._fidelity),
            hash_ids=lambda more: hasher.hash_blocks(scope, more),
            echo=echo,
            scope=scope,
        )

    def _ids(self, source: PromptSource, limit: int) -> Sequence[int]:
        if isinstance(source, IdsPrompt):
            if len(source.ids) > limit:
                raise prompt_too_long(len(source.ids), limit + 1, source.param)
            check_ids(source.ids, self._vocab_size, source.param)
            return source.ids
        if isinstance(source, TextPrompt):
            text, special = source.text, source.special
        else:
            text, special = self._render(source), False  # a template writes BOS itself
        self._refuse_by_length(text, limit, source.param)
        ids = compact(self._encode(text, special=special))
        if len(ids) > limit:
            raise prompt_too_long(len(ids), limit + 1, source.param)
        return ids

    def _render(self, source: ChatPrompt) -> str:
        if self._template is None:
            raise ClientError("messages: this model has no chat template", param="messages", code="no_chat_template")
        told = source.tools or None
        return self._template.render(source.messages, tools=told, add_generation_prompt=source.add_generation_prompt)

    def _refuse_by_length(self, text: str, limit: int, param: str) -> None:
        """Refuse what is certainly longer than `limit` tokens without tokenizing all of it."""
        if len(text) <= 2 * GLANCE_CHARS_PER_TOKEN * limit:
            return
        num_bytes = len(text.encode())
        least = num_bytes // (self._table.max_bytes * NORMALIZED_BYTES_PER_BYTE)
        if least <= limit:
            beginning = text[: GLANCE_CHARS_PER_TOKEN * limit]
            least = len(self._encoder.encode(beginning, special=False)) - GLANCE_SLACK_TOKENS
        if least > limit:
            raise prompt_too_long(least, limit + 1, param, at_least=True)

    def _echo(self, source: TextPrompt | IdsPrompt, ids: Sequence[int]) -> Echo:
        table = self._table
        if isinstance(source, IdsPrompt):
            pieces = pieces_of([table.text_bytes(token) for token in ids])
            return Echo("".join(pieces), tuple(pieces), table.open_bytes(ids))
        literal = [table.literal(token) for token in ids]
        spelled = aligned(literal, source.text.encode())
        if spelled is None and ids[0] == self._encoder.bos_id:
            without_bos = [b"", *literal[1:]]  # the tokenizer put it there
            spelled = aligned(without_bos, source.text.encode()) or without_bos
        return Echo(source.text, tuple(pieces_of(spelled or literal)), b"")


def compact(ids: Sequence[int]) -> Sequence[int]:
    """Many ids as an array: to make a list of them into bytes, or to free it, holds the interpreter, and with it the
    event loop, for tens of milliseconds. Here that is done piece by piece, and `ids` is used up."""
    if not isinstance(ids, list) or len(ids) <= SLICE_IDS:
        return ids
    packed = array("i")
    for start in range(0, len(ids), SLICE_IDS):
        packed.fromlist(ids[start : start + SLICE_IDS])
    while ids:
        del ids[-SLICE_IDS:]
    return packed


def aligned(tokens: list[bytes], text: bytes) -> list[bytes] | None:
    """The tokens' bytes so that they join to `text`, or None if they do not.

    SentencePiece puts a dummy space before a text and after special tokens; it is left out.
    """
    out, position = [], 0
    for data in tokens:
        if not text.startswith(data, position):
            data = data.removeprefix(b" ")
            if not text.startswith(data, position):
                return None
        out.append(data)
        position += len(data)
    return out if position == len(text) else None


def size_of(source: PromptSource) -> int:
    """Characters that a prompt has about, for choosing the queue."""
    if isinstance(source, TextPrompt):
        return len(source.text)
    if isinstance(source, IdsPrompt):
        return len(source.ids)
    called = sum(len(str(message["tool_calls"])) for message in source.messages if "tool_calls" in message)
    return sum(len(message["content"]) for message in source.messages) + called + (len(str(source.tools)) - 2)


def pieces_of(tokens: list[bytes]) -> list[str]:
    """The characters that become complete with each token; a last incomplete one belongs to none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(data) for data in tokens]
