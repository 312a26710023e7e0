"""What a finished sample leaves for the conversation's next turn: its full blocks, published here and offered to ctx.

Only with `backflow`. The prompt's blocks have hashes already; those that reach into the output are hashed here, from
the tail of the prompt and the output, in the prompt's scope. State exists for every token but the last, also where a
pass that computes the last one's has been launched (run_ahead.py): that pass has not landed, and the token may be none.
What is not exact in every token, or has lost pages to a window, stays. Knows no peer; dies with its loop.
"""

from __future__ import annotations

from tailrace.engine.sequence import Sequence
from tailrace.gen_worker.request import Request
from tailrace.kv_cache.block_hash import HASH_BYTES, BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import EXACT, KvManager
from tailrace.transfer.loop_events import Turn
from tailrace.transfer.messages import PageDescriptor


def turn_hashes(hasher: BlockHasher, request: Request, sequence: Sequence) -> bytes:
    """Packed hashes of all full blocks whose state is computed; empty if the ids they need are not here."""
    size = hasher.block_tokens
    blocks, known = (sequence.num_computed - sequence.flying) // size, len(request.hashes) // HASH_BYTES
    if blocks <= known:
        return request.hashes[: blocks * HASH_BYTES]
    ids = [*request.tail, *sequence.output]
    first = sequence.num_prompt_tokens - len(request.tail)
    if known * size < first:
        return b""
    more = hasher.hash_blocks(
        request.scope, ids[known * size - first : blocks * size - first], request.hashes[-HASH_BYTES:]
    )
    return request.hashes + more


def publish_turn(kv: KvManager, hasher: BlockHasher, request: Request, sequence: Sequence) -> Turn | None:
    """Make a sample's pages findable, while the caller holds them.

    Returns:
        What to offer to the ctx that the prompt came from, with the generation numbers of now; None if there is nothing
        beyond what it gave, or nobody to offer it to.
    """
    if request.fidelity != EXACT or SCRATCH_PAGE in sequence.pages:
        return None
    hashes = turn_hashes(hasher, request, sequence)
    num_tokens = len(hashes) // HASH_BYTES * hasher.block_tokens
    if num_tokens <= request.num_tokens // hasher.block_tokens * hasher.block_tokens:
        return None
    kv.publish(request.namespace, hashes, sequence.pages, num_tokens)
    if not request.ctx:
        return None
    hit = kv.match_prefix(request.namespace, hashes, num_tokens, whole=True)
    pages = tuple(PageDescriptor(0, i, page, kv.descriptor_generation(page)) for i, page in enumerate(hit.pages))
    kv.release(hit.pages)  # the sequence holds them, or their first publisher's entry keeps them; the numbers tell
    return Turn(request.key, request.ctx, request.namespace, hashes, hit.num_tokens, pages) if pages else None
