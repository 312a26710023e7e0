"""Every frame that crosses a socket between ingress, router, ctx and gen. Frozen data only, torch-free.

`transfer/frames.py` packs them (msgpack arrays, positional, checked against the annotations). Token ids and block
hashes travel as packed bytes. (request, attempt) is in every request frame: `request` is made by the ingress (32 hex
digits) and independent of any text of the client.

Who sends what:
    ingress -> router   Place Done Query             router -> ingress   Placed Refused Deaths Answer
    ingress -> worker   Submit Renew Cancel          worker -> ingress   Tokens Fail
    router  -> worker   Epoch Peers Bind Cancel Deaths Drain SetFaults
    worker  -> router   Register Heartbeat Holding Progress Bound NotNow Unbind EpochRefused Drain
    gen     -> ctx      Hello Want Release Fail      ctx    -> gen       Hello Refuse Ready Landed Handoff Valid Expired
                                                                         Fail
    anyone  -> router   Stats Deaths
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tailrace.model.sampling_params import SamplingParams

PROTOCOL_VERSION = 1
HASH_BYTES = 16
ID_BYTES = 4


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of pack_ids; raises ValueError if the length is no multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


# ---------------------------------------------------------------------------------------------------- identity, pairing


@dataclass(frozen=True, slots=True)
class CompatRecord:
    """What two workers must agree on before a page may move. Compared field by field, in this order."""

    protocol: int
    model: str  # hash over config, weights revision and tokenizer
    dtype: str
    tokens_per_page: int
    block_tokens: int
    groups: tuple[str, ...]  # one description a state group, layers and shapes read from the allocated tensors
    page_bytes: tuple[int, ...]  # a group
    tp: int
    codecs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a pair, both ways. `transports`: name -> what the other side needs (arena name, metadata)."""

    worker: str
    boot: str
    compat: CompatRecord
    transports: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The pair is refused; the sender closes after it."""

    field: str
    mine: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Register:
    """First frame of a worker to a router. `total_pages` leaves out the scratch page."""

    worker: str
    boot: str
    home: str  # ctx | gen
    duty: str  # ctx | gen | both
    host: str
    port: int
    total_pages: int
    tokens_per_page: int
    max_num_tokens: int
    max_request_tokens: int
    compat: CompatRecord
    epoch: int  # highest epoch number this worker has accepted
    router_boot: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Once `heartbeat_s`, from the transfer thread; `stamp_age_s` is the age of the loop's progress stamp."""

    worker: str
    boot: str
    phase: str  # load | compile | run
    stamp_age_s: float
    free_pages: int  # free + cached
    used_pages: int
    running: int
    queued: int
    queue_age_s: float
    prefill_tokens_queued: int
    prefill_tokens_per_s: float  # measured, 0 until known
    transfer_bytes_per_s: float
    pairs: tuple[str, ...]  # boot ids of peers whose pair is usable


@dataclass(frozen=True, slots=True)
class Held:
    """One request in a worker's whole set. `pages`: held here; `needs`: gen pages an unbound request will need.

    `seconds_left`: of its prefill; None while it is not known, 0 once it is over.
    """

    request: str
    attempt: int
    pages: int
    needs: int
    leg: str  # prefill | local | decode
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Holding:
    """The whole set, each second. `seen`: number of the last router frame handled (replaces belief up to it)."""

    worker: str
    boot: str
    seen: int
    requests: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int
    router_boot: str


@dataclass(frozen=True, slots=True)
class EpochRefused:
    """A worker's answer to an Epoch that is lower than, or clashes with, the one it accepted."""

    number: int
    router_boot: str


@dataclass(frozen=True, slots=True)
class PeerAddress:
    worker: str
    boot: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Peers:
    """The ctx workers that this gen shall pair with, at most `pairs_per_worker`; a whole set, not a difference."""

    peers: tuple[PeerAddress, ...]


@dataclass(frozen=True, slots=True)
class Deaths:
    """Boot ids that are gone for good."""

    boots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    limit_s: float


# ---------------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class Place:
    """Ingress asks for a place. `hashes`: packed block hashes of the prompt's full blocks.

    Sent again, unchanged but for `at`, to a router that the ingress has just linked to (again): for every attempt that
    has no answer yet (`at` empty) and for every one that is placed on a ctx and has no gen yet (`at`: that ctx's boot
    id; the router takes it over and answers with the `decode` leg only). `exclude`: boot ids that failed this request
    before, avoided if others are there. With max_new_tokens <= 1 no gen will be bound.
    """

    request: str
    attempt: int
    num_tokens: int  # prompt and, in a later attempt, the output so far
    max_new_tokens: int
    samples: int
    hashes: bytes
    tenant: str
    priority: int
    deadline_s: float | None  # time left
    conversation: str | None
    deaths: int  # workers this request has seen die
    namespace: bytes
    exclude: tuple[str, ...]
    at: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a leg of the request is. leg `prefill` or `local` answers Place; `decode` follows when a gen is bound."""

    request: str
    attempt: int
    leg: str
    worker: str
    boot: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No place. After a Placed it means that this attempt cannot get (another) gen: it is over for the router.

    reason: no_gen | no_ctx | no_pair | too_large | queue_full | deadline | worker_deaths | gen_lost | bind_failed.
    """

    request: str
    attempt: int
    status: int  # 429 | 503
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """First terminal report of an attempt; every claim goes back.

    outcome: finished | cancelled | refused | failed | migrating.
    """

    request: str
    attempt: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Ctx to router until a gen is bound. `last_launched`: the last chunk's forward has been launched."""

    request: str
    attempt: int
    tokens_ready: int
    tokens_total: int
    seconds_left: float
    last_launched: bool


@dataclass(frozen=True, slots=True)
class Bind:
    """Router asks a gen to reserve pages and read from ctx."""

    seq: int
    request: str
    attempt: int
    ctx: PeerAddress
    num_tokens: int
    max_new_tokens: int
    samples: int
    hashes: bytes
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Bound:
    request: str
    attempt: int
    pages: int


@dataclass(frozen=True, slots=True)
class NotNow:
    """All-or-nothing did not fit (or the pair is not usable). The request stays unbound."""

    request: str
    attempt: int
    why: str
    needed: int
    free: int
    retry_s: float


@dataclass(frozen=True, slots=True)
class Unbind:
    """Gen to router: it gave up reading (expired, read failed); router binds anew or the ingress re-places."""

    request: str
    attempt: int
    reason: str


# ----------------------------------------------------------------------------------------------------- ingress, workers


@dataclass(frozen=True, slots=True)
class Submit:
    """A leg of one attempt. leg `prefill` (ctx) or `local` (a gen prefills and decodes).

    `output_ids`: what a former attempt already sent of sample 0; empty at first. `samples` samples share one prefill.
    `hashes` cover the full blocks of prompt + output_ids. `no_cache`: match no prefix (prompt logprobs need all rows).
    """

    request: str
    attempt: int
    leg: str
    prompt_ids: bytes
    output_ids: bytes
    params: SamplingParams
    samples: int
    hashes: bytes
    namespace: bytes
    priority: int
    lease_s: float
    timeout_s: float | None
    no_cache: bool


@dataclass(frozen=True, slots=True)
class Renew:
    """Extends the request lease of each (request, attempt), and makes this link the one that its tokens go to."""

    keys: tuple[tuple[str, int], ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    request: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`top`: (id, logprob) by falling logprob then rising id. logprob None: a prompt's first token."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample. `start`: index of the first among the sample's output tokens, so repeats are seen.

    `finish`: None | stop | length. `stop_id`: the id that ended it, itself not in `ids`' text. `prompt_logprobs` and
    `cached_tokens` come with the first delta. `stamps`: durations in seconds on the sender's clock (queue, prefill).
    """

    request: str
    attempt: int
    sample: int
    start: int
    ids: bytes
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None
    stop_id: int | None
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    stamps: dict[str, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One frame a pass and ingress."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """An attempt failed at the sender. code: out_of_pages|timeout|expired|transfer|lost|internal|refused|not_posted.

    From ctx to gen: there is, or will be, nothing more to read (also code `ended`, which no ingress sees). From gen to
    ctx: this reader has given up, another may be bound.
    """

    request: str
    attempt: int
    code: str
    message: str
    retryable: bool


# -------------------------------------------------------------------------------------------------------------- pages


@dataclass(frozen=True, slots=True)
class PageDescriptor:
    """A page that may be read: what may cross the wire (a bare page id may not)."""

    group: int
    ordinal: int  # position in the sequence: covers tokens [ordinal * B, (ordinal + 1) * B)
    page: int
    generation: int


@dataclass(frozen=True, slots=True)
class LandingGrant:
    """A landing chunk that ctx may write once. `chunk`: its index at gen; `sequence` guards re-use."""

    chunk: int
    sequence: int
    nbytes: int


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
    pages: tuple[PageDescriptor, ...]


@dataclass(frozen=True, slots=True)
class Handoff:
    """All that makes gen able to decode, beside the pages.

    `first_tokens`: one a sample; `finished`: per sample, whether its first token ended it. `tail_ids`: the last k
    prompt ids (all of them when gen_prompt_tail_tokens is unset). `counts`: token id -> count over the whole prompt
    (only if the params need counts). `output_ids`: what former attempts sent. `num_tokens`: tokens whose state is in
    the pages.
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


# ---------------------------------------------------------------------------------------------------------- observation


@dataclass(frozen=True, slots=True)
class Stats:
    """A process's metric families as (name, type, help, ((sample name, labels, value), ...)); each stats period."""

    role: str
    process: str
    families: tuple[tuple[str, str, str, tuple[tuple[str, dict[str, str], float], ...]], ...]


@dataclass(frozen=True, slots=True)
class Query:
    """An ingress asks the router for what operators see. what: ready | cluster | metrics; `number` comes back."""

    number: int
    what: str


@dataclass(frozen=True, slots=True)
class Answer:
    """`text`: a JSON object (ready: {status, reasons}; cluster), or Prometheus text (metrics)."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class SetFaults:
    """Tests only: the whole fault configuration of one worker as JSON (transfer/faults.py)."""

    faults: str


FRAMES: tuple[type, ...] = (
    Hello, Refuse, Register, Heartbeat, Holding, Epoch, EpochRefused, Peers, Deaths, Drain,
    Place, Placed, Refused, Done, Progress, Bind, Bound, NotNow, Unbind,
    Submit, Renew, Cancel, Tokens, Fail,
    Want, Ready, Landed, Handoff, Release, Valid, Expired,
    Stats, Query, Answer, SetFaults,
)  # fmt: skip
