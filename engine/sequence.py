"""One sequence of tokens and the pages that hold its state, from a loop's side of the engine.

    num_known      tokens whose ids are known, to the host or to the device (`flying`): prompt and output
    num_computed   of them, those whose state is in the pages; the next row starts here
    remaining      what a prefill still has to compute; 1 while decoding (the last token's state is not there yet)

A decode row is the chunk of length 1; a sequence that lost its pages is prefilled again over prompt and output and goes
on where it was, because its sampler state stayed. Knows no request and no frame. Dies with its loop.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tailrace.engine.step import UNKNOWN, Row, SamplerState
from tailrace.kv_cache.layout import SCRATCH_PAGE, Layout

CopyPages = Callable[[Seq[int], Seq[int]], None]
"""Engine.copy_pages."""

if TYPE_CHECKING:
    from tailrace.kv_cache.manager import KvManager
    from tailrace.model.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample, or the prefill that a request's samples share.

    Attributes:
        key: (request, attempt).
        order: age in this loop; rises with arrival and is shared by the samples of a request.
        received: clock when the request came.
        priority: lower is more urgent.
        prompt: [num_prompt_tokens - prompt_from] int32; None where only a tail is here that nobody computes.
        prompt_from: position of its first id; above 0 only the prompt's tail is here, so it cannot be recomputed.
        output: output tokens, those of earlier attempts included.
        samplers: one a sample drawn after the last known token; empty for a prefill without output.
        hashes: packed block hashes from position 0, as far as they are known.
        use_cache: whether the prefix index may be asked.
        prompt_logprobs: alternatives a prompt token, None for none.
        pages: page of each ordinal (history, then state: kv_cache/layout.py), held by the loop; empty while waiting.
        num_cached: tokens found in the prefix index when its pages were first reserved.
        drafts: guesses of the tokens behind the known ones.
        chances: of each to be right if those before it are.
        snapshots_at: after so many tokens each the state pages are to be kept for others.
        upper_from: the upper layers begin at this position (kernels/paged_attention.RowSpan).
        state_step: what its state lacks, if it does: only those who can do without it find its snapshots.
        last_token_at: clock of the last token.
        flying: tokens that launched steps draw and nobody knows yet.
    """

    key: tuple[str, int]
    order: int
    received: float
    num_prompt_tokens: int
    prompt: np.ndarray | None
    samplers: tuple[SamplerState, ...]
    output: list[int] = field(default_factory=list)
    priority: int = 0
    hashes: bytes = b""
    namespace: bytes = b""
    use_cache: bool = True
    prompt_logprobs: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    snapshots_at: frozenset[int] = frozenset()
    last_token_at: float | None = None
    drafts: Seq[int] = ()
    chances: Seq[float] = ()
    flying: int = 0
    prompt_from: int = 0
    upper_from: int = 0
    state_step: str = ""
    _table: np.ndarray | None = None

    @property
    def is_whole(self) -> bool:
        """All its ids are here, so it can be computed from the start."""
        return self.prompt is not None and not self.prompt_from

    @property
    def num_known(self) -> int:
        return self.num_prompt_tokens + len(self.output) + self.flying

    @property
    def ends_in_flight(self) -> bool:
        """Whether a launched step draws its last token."""
        state = self.samplers[0] if self.flying else None
        return state is not None and state.num_output_tokens + self.flying >= state.params.max_tokens

    @property
    def remaining(self) -> int:
        return self.num_known - self.num_computed

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first; samples of one request by their index."""
        return (self.order, self.samplers[0].sample if self.samplers else 0)

    def row(self, num_tokens: int, num_drafts: int = 0, want_drafts: int = 0) -> Row:
        """The next `num_tokens` tokens as a row; with samplers, and perhaps drafts, if they are the last known."""
        start, end = self.num_computed, self.num_computed + num_tokens
        next_ids = None
        if self.prompt_logprobs is not None:
            next_ids = self.ids(start + 1, min(end + 1, self.num_prompt_tokens))
            next_ids = np.concatenate((next_ids, np.full(num_tokens - len(next_ids), -1, np.int32)))
        ids = self.ids(start, end)
        return Row(
            key=self,
            ids=np.concatenate((ids, np.array(self.drafts[:num_drafts], np.int32))) if num_drafts else ids,
            start=start,
            pages=self.table(),
            samplers=self.samplers if end == self.num_known else (),
            prompt_logprobs=self.prompt_logprobs,
            next_ids=next_ids,
            num_drafts=num_drafts,
            want_drafts=want_drafts,
            upper_from=self.upper_from,
        )

    def ids(self, start: int, end: int) -> np.ndarray:
        """[end - start] int32 of known tokens; UNKNOWN of those that a launched step draws."""
        if self.flying:
            return np.full(end - start, UNKNOWN, np.int32)
        prompt_end = self.num_prompt_tokens
        if start >= prompt_end:
            return np.array(self.output[start - prompt_end : end - prompt_end], np.int32)
        assert self.prompt is not None and start >= self.prompt_from, "these ids are not here"
        first = start - self.prompt_from
        if end <= prompt_end:
            return self.prompt[first : first + max(0, end - start)]
        return np.concatenate((self.prompt[first:], np.array(self.output[: end - prompt_end], np.int32)))

    # ---------------------------------------------------------------------------------------------------------- pages

    def table(self) -> np.ndarray:
        """[num_pages] int32, the page of each ordinal."""
        if self._table is None or len(self._table) != len(self.pages):
            self._table = np.array(self.pages, np.int32)
        return self._table

    def take_pages(self) -> list[int]:
        """Give up every page (SCRATCH_PAGE left out): the sequence starts again from nothing."""
        taken = [page for page in self.pages if page != SCRATCH_PAGE]
        self.pages, self._table, self.num_computed, self.flying = [], None, 0, 0
        return taken

    def take_pages_before(self, ordinal: int) -> list[int]:
        """Give up the pages before `ordinal`, which a window has left behind."""
        taken = [page for page in self.pages[:ordinal] if page != SCRATCH_PAGE]
        if taken:
            self.pages[:ordinal] = [SCRATCH_PAGE] * ordinal
            self._table = None
        return taken

    def room(self, layout: Layout) -> int:
        """Tokens that its pages hold."""
        return (len(self.pages) - layout.num_state_pages) * layout.tokens_per_page

    def add_history_pages(self, pages: Seq[int], num_state_pages: int) -> None:
        """Grow by these, which the caller holds."""
        at = len(self.pages) - num_state_pages
        self.pages[at:at] = pages
        self._table = None

    # --------------------------------------------------------------------------------------------------------- making

    @classmethod
    def for_prefill(
        cls,
        key: tuple[str, int],
        prompt: np.ndarray,
        output: list[int],
        params: SamplingParams,
        samples: int,
        eos_ids: frozenset[int],
        first_sample: int = 0,
    ) -> Sequence:
        """The prefill that `samples` samples share; order, cache fields and priority are the caller's to set."""
        indices = range(first_sample, first_sample + samples)
        samplers = sampler_states(params, indices, len(prompt), eos_ids, prompt_counts(prompt, params), output)
        return cls(
            key,
            order=0,
            received=0.0,
            num_prompt_tokens=len(prompt),
            prompt=prompt,
            samplers=samplers if params.max_tokens > 0 else (),
            output=list(output),
            prompt_logprobs=None if output else params.prompt_logprobs,
            use_cache=params.prompt_logprobs is None or bool(output),
        )

    def sample(self, state: SamplerState, token: int) -> Sequence:
        """A sample of this prefill whose first new token is `token`; it has no pages yet."""
        return Sequence(
            self.key,
            order=self.order,
            received=self.received,
            num_prompt_tokens=self.num_prompt_tokens,
            prompt=self.prompt,
            prompt_from=self.prompt_from,
            samplers=(state,),
            output=[*self.output, token],
            priority=self.priority,
            hashes=self.hashes,
            namespace=self.namespace,
            use_cache=self.use_cache,
            num_cached=self.num_cached,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's next `num_tokens` tokens, chosen for a pass; the first `num_drafts` drafts go with the last ones."""

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0
    want_drafts: int = 0

    @property
    def last(self) -> bool:
        """True if the sequence samples after it. To be asked before num_computed moves."""
        return self.num_tokens == self.sequence.remaining

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes for it."""
        return self.num_tokens + self.num_drafts

    def row(self) -> Row:
        return self.sequence.row(self.num_tokens, self.num_drafts, self.want_drafts)

    def up_to_cut(self) -> Chunk:
        """The chunk, ended where the sequence's state pages are to be kept, or its upper layers begin."""
        cuts = (*self.sequence.snapshots_at, self.sequence.upper_from)
        left = [end - self.sequence.num_computed for end in cuts]
        return Chunk(self.sequence, min((n for n in left if 0 < n < self.num_tokens), default=self.num_tokens))


def prompt_counts(prompt: np.ndarray, params: SamplingParams) -> dict[int, int]:
    """Token id -> count over the prompt, if the parameters need counts; else empty."""
    if not params.needs_counts:
        return {}
    ids, counts = np.unique(prompt, return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def sampler_states(
    params: SamplingParams,
    samples: Seq[int],
    num_prompt_tokens: int,
    eos_ids: frozenset[int],
    counts: dict[int, int],
    output: Seq[int],
) -> tuple[SamplerState, ...]:
    """One state a sample index, after the `output` tokens that the samples share."""
    states = tuple(SamplerState(params, s, num_prompt_tokens, eos_ids, counts) for s in samples)
    for state in states:
        for token in output:
            state.observe(token)
    return states


def reserve(kv: KvManager, sequence: Sequence, copy_pages: CopyPages, *, spare: int = 0) -> bool:
    """Pages for all known tokens at once: prefix hits first, the rest new. All or nothing, so that prefills never wait
    for one another's pages while holding some.

    Args:
        copy_pages: fills state pages from a snapshot that the prefix ends with.
        spare: pages that must stay available.

    Returns:
        False, nothing held, if it does not fit now.
    """
    pages: list[int] = []
    num_tokens = known = 0
    snapshot: list[int] = []
    if sequence.use_cache and sequence.hashes:
        steps = (sequence.state_step,) if sequence.state_step else ()
        hit = kv.match_prefix(sequence.namespace, sequence.hashes, sequence.num_known, steps=steps)
        pages, num_tokens, snapshot = list(hit.pages), hit.num_tokens, list(hit.snapshot)
        known = hit.known_tokens
    missing = kv.layout.num_pages(sequence.num_known) - len(pages)
    fresh = kv.allocate(missing) if kv.available() - missing >= spare else None
    if fresh is None:
        if pages:
            kv.release(pages + snapshot)
        return False
    if snapshot:
        copy_pages(snapshot, fresh[-len(snapshot) :])
        kv.release(snapshot)
    sequence.pages = pages + fresh
    sequence.num_computed = num_tokens
    if sequence.num_cached is None:
        sequence.num_cached = num_tokens
    if sequence.use_cache:
        # Near its own end, where the next turn goes on; and where another prompt has gone another way: more may do so.
        before = (sequence.num_known, known + 1)
        where = (sequence.namespace, sequence.hashes)
        ends = (kv.snapshot_tokens(*where, number, sequence.state_step) for number in before)
        sequence.snapshots_at = frozenset(end for end in ends if end > num_tokens)
    return True


def keep_snapshot(kv: KvManager, sequence: Sequence, copy_pages: CopyPages) -> None:
    """If a prefill has come to where its state pages are to be kept: publish a copy of them and the prefix before, for
    prompts that begin alike, if there is room for it now."""
    if sequence.num_computed not in sequence.snapshots_at:
        return
    number = kv.layout.num_state_pages
    copy = kv.allocate(number)
    if copy is None:
        return
    copy_pages(sequence.pages[-number:], copy)
    kv.publish(sequence.namespace, sequence.hashes, sequence.pages, sequence.num_computed)
    kv.publish_snapshot(sequence.namespace, sequence.hashes, sequence.num_computed, copy, sequence.state_step)
    kv.release(copy)
