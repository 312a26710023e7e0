"""Every frame that crosses a socket between ingress, router, ctx and gen. Frozen data only, torch-free.

Those about pages stand in page_frames.py, those about cached prefixes in cache_frames.py; all are named here.
`transfer/frames.py` packs them (msgpack arrays, positional, checked against the annotations). Token ids and block
hashes travel as packed bytes. (request, attempt) is in every request frame: `request` is made by the ingress (32 hex
digits) and independent of any text of the client.

Who sends what:
    ingress -> router   Place Done Query             router -> ingress   Placed Refused Deaths Answer
    ingress -> worker   Submit Renew Cancel          worker -> ingress   Tokens Fail
    router  -> worker   Epoch Peers Bind Cancel Deaths Drain SetFaults CacheQuery
    worker  -> router   Register Heartbeat Holding Progress Bound NotNow Unbind EpochRefused Drain
                        CacheEvent
    gen     -> ctx      Hello Want Release Fail      ctx    -> gen       Hello Refuse Ready Landed Handoff Valid Expired
                        WantSums Mistrust Offer                          Fail Sums
    anyone  -> router   Stats Deaths
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.cache_frames import CacheEvent, CacheQuery
from tailrace.transfer.compat import CompatRecord as CompatRecord
from tailrace.transfer.compat import GroupRecord as GroupRecord
from tailrace.transfer.measured import PairCost as PairCost
from tailrace.transfer.measured import PrefillSample as PrefillSample
from tailrace.transfer.measured import Timing as Timing
from tailrace.transfer.page_frames import (
    Expired,
    Handoff,
    Landed,
    Mistrust,
    Notice,
    Offer,
    Ready,
    Release,
    Sums,
    Valid,
    Want,
    WantSums,
)
from tailrace.transfer.page_frames import LandingGrant as LandingGrant
from tailrace.transfer.page_list import PageDescriptor as PageDescriptor

PROTOCOL_VERSION = 3
NOT_HELD = "not_held"  # Fail.code
HASH_BYTES = 16
ID_BYTES = 4


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of pack_ids; raises ValueError if the length is no multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def handed_tokens(num_tokens: int, left_to_gen: int) -> int:
    """Tokens of a prompt that ctx computes and hands over. One at least, or there would be nothing to bind for; where
    that is one more than was meant, gen computes it again."""
    return max(1, num_tokens - left_to_gen) if left_to_gen else num_tokens


# ---------------------------------------------------------------------------------------------------- identity, pairing


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
    max_batch_size: int = 0  # sequences that decode here at once; 0: it does not decode, or does not say
    state_pages: int = 0  # of each sequence, beside those that grow with it


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
    codecs: tuple[tuple[str, str, str], ...] = ()  # (boot id of a peer, what pages go through, why)
    prefills: tuple[PrefillSample, ...] = ()  # that ended since the last heartbeat
    costs: tuple[PairCost, ...] = ()
    cache_sequence: int = 0  # of the last CacheEvent before it, so that the loss of the last one is found too


@dataclass(frozen=True, slots=True)
class Held:
    """One request in a worker's whole set. `pages`: held here; `needs`: tokens that an unbound one needs gen pages for.

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
    before, avoided if others are there. `left_to_gen`: as Submit has it. With max_new_tokens <= 1 no gen will be bound,
    unless it is to draw the first token.
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
    left_to_gen: int = 0


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

    reason: no_gen | no_ctx | no_pair | too_large | queue_full | deadline | worker_deaths | gen_lost | bind_failed, with
    status 503; rate | fairness, about its tenant, with 429.
    """

    request: str
    attempt: int
    status: int  # 429 | 503
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """First terminal report of an attempt; every claim goes back.

    outcome: finished | cancelled | refused | failed | migrating. `faults`: boot ids of the workers whose fault it was
    (either end of a pair, if that cannot be told); empty where it was nobody's, the client's, or a death. `timing`: of
    the attempt that brought the request's first token. `prompt_tokens`, `output_tokens`: what was served and no Done of
    the request has told before; the router charges its tenant for them.
    """

    request: str
    attempt: int
    outcome: str
    reason: str
    faults: tuple[str, ...] = ()
    timing: Timing | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Ctx to router until a gen is bound, and once more at the end of the prefill.

    `last_launched`: the last chunk's forward has been launched. `read`: this is that end, and a gen is reading.
    """

    request: str
    attempt: int
    tokens_ready: int
    tokens_total: int
    seconds_left: float
    last_launched: bool
    read: bool = False


@dataclass(frozen=True, slots=True)
class Bind:
    """Router asks a gen to reserve pages for all tokens, and to read those from ctx that are not left to it."""

    seq: int
    request: str
    attempt: int
    ctx: PeerAddress
    num_tokens: int
    max_new_tokens: int
    samples: int
    hashes: bytes
    namespace: bytes
    left_to_gen: int = 0


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

    `output_ids`: what former attempts already sent of its one sample; empty at first. `samples` samples share one
    prefill; they are numbered from `first_sample` on, in draws and in deltas.
    `hashes` cover the full blocks of prompt + output_ids. `no_cache`: match no prefix (prompt logprobs need all
    rows; pages of a former attempt were corrupt). `left_to_gen`: the last so many of all tokens are not for ctx, which
    leaves out the upper layers and draws nothing (bounded replay); 0: it computes all and draws the first token.
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
    scope: str = ""  # of its block hashes
    first_sample: int = 0
    left_to_gen: int = 0


@dataclass(frozen=True, slots=True)
class Renew:
    """Extends the request lease of each (request, attempt), and makes this link the one that its tokens go to.

    What the worker neither works on nor has tokens of is answered with Fail, code `not_held`: so no ingress waits for
    ever for what a worker has lost, or ended with a word that got lost.
    """

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
class Moved:
    """How a prompt's pages came to gen: what the receipt says of the hand-off.

    `logical_bytes`, `wire_bytes`: worth before the codec, and moved. `pages`, `pages_skipped`: of ctx's, those that
    were read, and those that were not because gen had them or no longer needs them. `verified`: their sums were
    compared. `seconds`: from bind to valid on gen's clock. `step`: what the state has lost, empty if it is exact.
    """

    transport: str
    codec: str
    logical_bytes: int
    wire_bytes: int
    pages: int
    pages_skipped: int
    verified: bool
    seconds: float
    step: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample. `start`: index of the first among the sample's output tokens, so repeats are seen.

    `finish`: None | stop | length. `stop_id`: the id that ended it, itself not in `ids`' text. `prompt_logprobs` and
    `cached_tokens` come with the first delta. `stamps`: durations in seconds on the clocks of who computed it (queue,
    prefill and, where gen computed the prompt's end, replay).
    `moved`: with the first delta after a hand-off.
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
    moved: Moved | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """One frame a pass and ingress."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """An attempt failed at the sender. code: out_of_pages | timeout | expired | transfer | corrupt | lost | internal |
    refused | not_posted | grammar | not_held (the answer to a Renew of what is not here, or not any more).

    From ctx to gen: there is, or will be, nothing more to read (also code `ended`, which no ingress sees). From gen to
    ctx: this reader has given up, another may be bound.
    """

    request: str
    attempt: int
    code: str
    message: str
    retryable: bool


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
    Want, Ready, Landed, Notice, Handoff, Release, Valid, Expired, WantSums, Sums, Mistrust, Offer,
    Stats, Query, Answer, SetFaults, CacheEvent, CacheQuery,
)  # fmt: skip
