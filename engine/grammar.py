"""Grammars on the worker: compiled once, one matcher a sample, a mask over the vocabulary for each token to be drawn.

    text (SamplingParams.grammar) -> compiled, in a thread, kept in an LRU -> copied for each sample, which has read
    its output so far -> before a draw: which ids may come -> after it: the drawn id is read

State is a function of the grammar and the output ids alone, so nothing of it travels: ctx and gen, a migration and a
recomputation all read the ids again (10,000 of them take 20 ms). A request whose grammar is not compiled yet waits in a
GrammarQueue while others go on. Masks are worked out in a thread while the forward runs.

A grammar that the library gives up on (too complex at some point) fails its own sample: its mask is empty and `error`
says why. Knows token bytes, no request, no frame. Dies with its process; nothing is worth saving.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tailrace.model.grammar_text import LIMITS, library_grammar

if TYPE_CHECKING:
    from tailrace.engine.sequence import Sequence

MAX_COMPILED = 64
MAX_COMPILED_BYTES = 4 << 20  # of grammar text; a compiled grammar takes some ten times its text
INLINE_TOKENS = 256  # output that is read again at once (0.5 ms), not in the thread

T = TypeVar("T")


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that an output does not follow."""


class Vocabulary(Protocol):
    """What this module needs of a tokenizer (model/tokenizer.py)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_bytes(self, token: int) -> bytes: ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...


class GrammarState:
    """One sample's place in its grammar.

    Attributes:
        ended: nothing more may come: the grammar is complete, or its EOS was read. The sample ends (`stop`).
        error: why it cannot go on, or None.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, mask_size: int, thread: ThreadPoolExecutor) -> None:
        self.ended = False
        self.error: str | None = None
        self._matcher, self._vocab_size, self._thread = matcher, vocab_size, thread
        self._bits = np.zeros(-(-mask_size // 32), np.int32)
        self._pending: Future[None] | None = None
        self._known = False  # the bits are those of the present place

    def accept(self, token: int) -> None:
        """Read one output token."""
        self.accept_all((token,))

    def accept_all(self, tokens: Seq[int]) -> None:
        """Read output tokens, in order."""
        self._settle()
        if self.ended or self.error is not None:
            return
        self._known = False
        self._matcher.consume_tokens(list(tokens))
        self._look()
        self.ended = self.error is None and self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """[vocab] bool, a new array: the ids that may come next, EOS where the output may end here."""
        self._settle()
        if not self._known:
            self.work_out()
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def work_out(self) -> None:
        """Have the mask ready."""
        if self._known:
            return
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._look()
        if self.error is not None:
            self._bits[:] = 0
        self._known = True

    def begin(self) -> None:
        """Start on the mask that the coming draw needs, beside the forward; `allowed` waits for it."""
        if not self._known:
            self._pending = self._thread.submit(self.work_out)

    def _settle(self) -> None:
        if self._pending is not None:
            work, self._pending = self._pending, None
            work.result()

    def _look(self) -> None:
        if self._matcher.is_error():
            self.error = (self._matcher.get_error() or "the grammar failed").strip()[:300]


class Grammars:
    """The compiled grammars of one tokenizer; thread-safe.

    Args:
        vocabulary: gives the tokenizer, when the first grammar comes: until then a worker needs none. With what the
            library makes of it that takes a second for 49,152 ids, in the thread.
        vocab_size: ids of the model.
        eos_ids: ids that end an output, allowed where the grammar is complete.
        max_compiled: grammars kept.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        max_compiled: int = MAX_COMPILED,
    ) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._eos_ids, self._max = sorted(eos_ids), max_compiled
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()  # of the two above
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._masks = ThreadPoolExecutor(1, "grammar-mask")

    def states(self, text: str, outputs: Seq[Seq[int]]) -> list[GrammarState]:
        """One state for each output, which it has read. Compiles if it must: up to seconds.

        Raises:
            GrammarError: the grammar cannot be compiled, or an output does not follow it.
        """
        with self._lock:
            matcher = self._compiled.get(text)
            if matcher is not None:
                self._compiled.move_to_end(text)
        if matcher is None:
            matcher = self._compile(text)
            self._keep(text, matcher)
        return [self._state(matcher, output) for output in outputs]

    def begin(self, text: str, outputs: Seq[Seq[int]]) -> Future[list[GrammarState]]:
        """`states`, in the thread; at once where that takes no time."""
        with self._lock:
            quick = text in self._compiled and sum(map(len, outputs)) <= INLINE_TOKENS
        if not quick:
            return self._thread.submit(self.states, text, outputs)
        done: Future[list[GrammarState]] = Future()
        try:
            done.set_result(self.states(text, outputs))
        except GrammarError as error:
            done.set_exception(error)
        return done

    def __len__(self) -> int:
        return len(self._compiled)

    def _state(self, matcher: LLMatcher, output: Seq[int]) -> GrammarState:
        state = GrammarState(matcher.deep_copy(), self._vocab_size, self._make_tokenizer().vocab_size, self._masks)
        if output:
            state.accept_all(output)
        if state.error is not None:
            raise GrammarError(f"the output so far does not follow the grammar: {state.error}")
        return state

    def _compile(self, text: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self._make_tokenizer(), library_grammar(text), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise GrammarError(f"the grammar cannot be compiled: {error}") from None
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error().strip()[:300]}")
        return matcher

    def _keep(self, text: str, matcher: LLMatcher) -> None:
        with self._lock:
            if text in self._compiled:
                return
            self._compiled[text] = matcher
            self._num_bytes += len(text)
            while len(self._compiled) > self._max or (self._num_bytes > MAX_COMPILED_BYTES and len(self._compiled) > 1):
                gone, _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(gone)

    def _make_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            tokens = _Tokens(self._vocabulary(), self._vocab_size, self._eos_ids)
            size = len(tokens.tokens)
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(tokens), n_vocab=size, eos_token=self._eos_ids or [tokens.eos_token_id]
            )
        return self._tokenizer


class _Tokens:
    """A vocabulary as the library's TokenizerWrapper wants it. The library needs an EOS: a model without one gets an id
    beyond its vocabulary, which is never drawn."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Seq[int]) -> None:
        self.bos_token_id = None
        self.tokens = [vocabulary.id_to_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({i for i in vocabulary.special_ids if i < len(self.tokens)} | {*eos_ids})
        if eos_ids:
            self.eos_token_id = eos_ids[0]
        else:
            self.eos_token_id = len(self.tokens)
            self.special_token_ids.append(self.eos_token_id)
            self.tokens.append(b"<|end of output|>")
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text, special=False)


class GrammarQueue(Generic[T]):
    """A loop's requests whose grammar is not ready yet. One thread only: the loop's.

    Args:
        grammars: None where this worker has none; requests with a grammar fail then.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[T, tuple[list[Sequence], Future[list[GrammarState]]]] = {}

    def add(self, item: T, sequences: Seq[Sequence], go_on: Callable[[T], None]) -> str | None:
        """Call `go_on(item)` now if no grammar is in the way, else give it back from `ready` later.

        Returns:
            Why the request's grammar cannot be followed, or None.
        """
        asked = [s for s in sequences if s.samplers and s.samplers[0].params.grammar]
        if asked and self._grammars is None:
            return "this worker follows no grammars"
        if asked and self._grammars is not None:
            outputs = [s.output for s in asked for _ in s.samplers]
            work = self._grammars.begin(asked[0].samplers[0].params.grammar, outputs)
            if not work.done():
                self._waiting[item] = (asked, work)
                return None
            if (why := attach(asked, work)) is not None:
                return why
        go_on(item)
        return None

    def ready(self) -> list[tuple[T, str | None]]:
        """Those whose wait is over, each with the reason if its grammar cannot be followed."""
        if not self._waiting:
            return []
        done = [item for item, (_, work) in self._waiting.items() if work.done()]
        return [(item, attach(*self._waiting.pop(item))) for item in done]

    def remove(self, item: T) -> None:
        """It waits for nothing any more."""
        if (found := self._waiting.pop(item, None)) is not None:
            found[1].cancel()

    def __len__(self) -> int:
        return len(self._waiting)


def attach(sequences: Seq[Sequence], work: Future[list[GrammarState]]) -> str | None:
    """Give each sampler its state, waiting for it; returns why there is none."""
    try:
        states = iter(work.result())
    except GrammarError as error:
        return str(error)
    for sequence in sequences:
        for sampler in sequence.samplers:
            sampler.grammar = next(states)
    return None
