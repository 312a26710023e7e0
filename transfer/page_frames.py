"""The frames by which pages move from ctx to gen, and back; see messages.py, which names them all. Frozen data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.page_list import PageDescriptor, PageList


@dataclass(frozen=True, slots=True)
class LandingGrant:
    """A landing chunk that ctx may write once. `chunk`: its index at gen; `sequence` guards re-use.

    `nbytes`: that it takes beside its header; `units`: pages of that ctx that are sure to fit, as they cross.
    """

    chunk: int
    sequence: int
    nbytes: int
    units: int


@dataclass(frozen=True, slots=True)
class Want:
    """Gen asks for pages [ordinals] it lacks; also renews the pin lease. Repeated with fresh grants (nixl).

    Ctx answers each with one Ready over those of the pages that are final, and with Handoff if `handoff` says that the
    record is still missing; so a frame lost with its link costs one renewal.
    """

    request: str
    attempt: int
    transport: str
    ordinals: tuple[tuple[int, int, int], ...]  # (group, first ordinal, past-the-last)
    grants: tuple[LandingGrant, ...]
    handoff: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Pages that are final and may be read. tokens_ready: absolute tokens whose state is final."""

    request: str
    attempt: int
    pages: tuple[PageDescriptor, ...]
    tokens_ready: int
    final: bool


@dataclass(frozen=True, slots=True)
class Landed:
    """What a landing write's notification says (nixl). `pages` in the order they stand in the chunk."""

    request: str
    attempt: int
    chunk: int
    sequence: int
    nbytes: int
    checksum: int
    pages: PageList


@dataclass(frozen=True, slots=True)
class Notice:
    """What one half of a transport tells the other (ray). `to_gen`: ctx's half says it."""

    transport: str
    to_gen: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class Handoff:
    """All that makes gen able to decode, beside the pages.

    `first_tokens`: one a sample; `finished`: per sample, whether its first token ended it. `tail_ids`: the last k
    prompt ids (all of them when gen_prompt_tail_tokens is unset). `counts`: token id -> count over the whole prompt
    (only if the params need counts). `output_ids`: what former attempts sent. `num_tokens`: tokens whose state is in
    the pages. `left_to_gen`: how many were to be left to gen; if any, there are no first tokens, and `stamps` and
    `cached_tokens` are for gen's first delta.
    """

    request: str
    attempt: int
    num_prompt_tokens: int
    num_tokens: int
    first_tokens: tuple[int, ...]
    finished: tuple[bool, ...]
    tail_ids: bytes
    counts: dict[int, int]
    output_ids: bytes
    hashes: bytes
    namespace: bytes
    params: SamplingParams
    samples: int
    priority: int
    lease_s: float
    scope: str = ""
    first_sample: int = 0
    left_to_gen: int = 0
    stamps: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Gen has all it wants. `seen`: (group, ordinal, generation) of every page it read."""

    request: str
    attempt: int
    seen: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Valid:
    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Expired:
    request: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class WantSums:
    """Gen asks for the page sums of what it reads (verify_pages), as ordinals in Want; those it repeats were not here.

    `first_token`: absolute; rows before it are not brought over and not summed.
    """

    request: str
    attempt: int
    first_token: int
    ordinals: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Sums:
    """Ctx to gen: sums of final pages, [pages, layer, field, kv_head] little-endian uint64, every head of the model."""

    request: str
    attempt: int
    pages: tuple[PageDescriptor, ...]
    sums: bytes


@dataclass(frozen=True, slots=True)
class Mistrust:
    """Gen found other bytes than ctx summed. `again`: bring these over once more. Else they were wrong twice: ctx gives
    them to nobody any more."""

    request: str
    attempt: int
    ordinals: tuple[tuple[int, int, int], ...]
    again: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """Gen to ctx, after a turn: published pages, by ordinal from 0, in gen's tokens a page. Nothing is kept for ctx."""

    request: str
    attempt: int
    namespace: bytes
    hashes: bytes
    num_tokens: int
    pages: tuple[PageDescriptor, ...]
