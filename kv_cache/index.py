"""The prefix index: which published pages hold the state of which prompt prefix, and which may go first.

One radix tree a namespace, whose edges are granules: as many tokens as the larger of page and block, so a node owns
whole pages and ends at a block's end. Because a block hash names its whole prefix, a node's key is the hash of its last
block, and nodes of a namespace are found in one dictionary. A lossy granule may hang below an exact one, never the
other way round.

A granule may have a snapshot: a copy of the state pages (layout.py) as they were at its end. It is a leaf below the
granule with the same key, in a tree of its own: whoever looks for a prefix does not meet it, all else about it (use,
idleness, eviction, being taken out with what is above) is like that of any leaf. Nobody outside is told of it. History
may be exact where the state at its end is not: then the snapshot's namespace is another than the granule's.

Knows pages only as numbers: the ledger (pool.py) decides whether one is in use and says so by `wake` and `rest`. Not
thread-safe. Dies with its worker; a lost index costs recomputation, never correctness.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from tailrace.kv_cache.block_hash import HASH_BYTES
from tailrace.kv_cache.changes import Changes, Hashes
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.errors import LedgerError


class Node:
    """One granule of one prefix, or a snapshot. `busy`: how many of its pages are in use. `last_used`: tick of the last
    match."""

    __slots__ = ("busy", "children", "is_snapshot", "key", "last_used", "namespace", "pages", "parent")

    def __init__(
        self, namespace: bytes, key: bytes, parent: Node | None, pages: tuple[int, ...], *, is_snapshot: bool = False
    ) -> None:
        self.namespace, self.key, self.parent, self.pages = namespace, key, parent, pages
        self.is_snapshot = is_snapshot
        self.children: set[Node] = set()
        self.busy = len(pages)
        self.last_used = 0


class PrefixIndex:
    """Maps (namespace, block hashes) to pages, and orders the idle ones by least recent use, leaves first.

    Args:
        tokens_per_page: tokens a page.
        block_tokens: tokens a block; divides tokens_per_page or is a multiple of it.
    """

    def __init__(self, tokens_per_page: int, block_tokens: int) -> None:
        self.granule_tokens = max(tokens_per_page, block_tokens)
        if self.granule_tokens % min(tokens_per_page, block_tokens):
            raise ValueError(f"page of {tokens_per_page} and block of {block_tokens} tokens: neither divides the other")
        self._hashes_per_granule = self.granule_tokens // block_tokens
        self._pages_per_granule = self.granule_tokens // tokens_per_page
        self._spaces: dict[bytes, dict[bytes, Node]] = {}
        self._snapshots: dict[bytes, dict[bytes, Node]] = {}
        self._node_of: dict[int, Node] = {}
        self._tick = 0
        self._serial = 0
        self._idle: list[tuple[int, int, Node]] = []  # heap of (last_used, serial, node); entries may be out of date
        self.changes: Changes | None = None  # told of every node that comes or goes

    def __len__(self) -> int:
        """Pages in the index."""
        return len(self._node_of)

    def __contains__(self, page: object) -> bool:
        return page in self._node_of

    def match(self, namespace: bytes, hashes: bytes, max_tokens: int) -> list[int]:
        """Pages of the longest known prefix of at most `max_tokens` tokens; marks them as just used."""
        return [page for node in self.match_among([namespace], hashes, max_tokens) for page in node.pages]

    def match_among(self, namespaces: Sequence[bytes], hashes: bytes, max_tokens: int) -> list[Node]:
        """As match, each granule from the first of the namespaces that knows it."""
        spaces = [space for space in map(self._spaces.get, namespaces) if space is not None]
        nodes: list[Node] = []
        self._tick += 1
        for key in self._keys(hashes, max_tokens):
            node = next((space[key] for space in spaces if key in space), None)
            if node is None:
                break
            self._touch(node)
            nodes.append(node)
        return nodes

    def snapshot(self, node: Node, others: Sequence[bytes] = ()) -> Node | None:
        """The snapshot at a granule's end, which counts as just used; None if there is none.

        Args:
            others: namespaces whose snapshots will do as well as those of the granule's own.
        """
        trees = (self._snapshots.get(space, {}) for space in (node.namespace, *others))
        found = next((tree[node.key] for tree in trees if node.key in tree), None)
        if found is not None:
            self._touch(found)
        return found

    def has_snapshot(self, namespace: bytes, key: bytes) -> bool:
        return key in self._snapshots.get(namespace, {})

    def insert_snapshot(
        self, namespace: bytes, key: bytes, pages: Sequence[int], own: bytes | None = None
    ) -> list[int]:
        """Enter the state pages at the end of the granule `key`.

        Args:
            own: the snapshot's namespace, if it is not the granule's.

        Returns:
            The pages that are in the index from now on, as busy; none if the granule is not there, or has a snapshot.
        """
        where = namespace if own is None else own
        parent = self._spaces.get(namespace, {}).get(key)
        if parent is None or self.has_snapshot(where, key):
            return []
        node = self._enter(Node(where, key, parent, tuple(pages), is_snapshot=True))
        self._tick += 1
        self._touch(node)
        return list(pages)

    def insert(
        self,
        namespace: bytes,
        hashes: bytes,
        pages: Sequence[int],
        num_tokens: int,
        lossy: tuple[int, bytes] | None = None,
    ) -> list[int]:
        """Enter the full granules of a sequence; the first publisher of a granule wins.

        Args:
            pages: page of each ordinal from the sequence's start; stops before a granule that has a scratch page.
            lossy: (tokens, namespace): granules that end behind so many tokens belong there. Pages among them that
                another such namespace has already stay in that one.

        Returns:
            The pages that are in the index from now on; all count as busy.
        """
        self._tick += 1
        entered: list[int] = []
        parent: Node | None = None
        for i, key in enumerate(self._keys(hashes, num_tokens)):
            own = tuple(pages[i * self._pages_per_granule : (i + 1) * self._pages_per_granule])
            if len(own) < self._pages_per_granule:
                raise LedgerError(f"{len(pages)} pages do not cover the {num_tokens} tokens to be published")
            is_lossy = lossy is not None and (i + 1) * self.granule_tokens > lossy[0]
            where = lossy[1] if lossy is not None and is_lossy else namespace
            node = self._spaces.get(where, {}).get(key)
            if node is None and is_lossy:
                found = self._node_of.get(own[0])
                node = found if found is not None and (found.key, found.pages) == (key, own) else None
            if node is None:
                if SCRATCH_PAGE in own:
                    break
                node = self._enter(Node(where, key, parent, own))
                entered.extend(own)
            self._touch(node)
            parent = node
        return entered

    def wake(self, pages: Iterable[int]) -> None:
        """These published pages are in use now."""
        for page in pages:
            self._node_of[page].busy += 1

    def rest(self, pages: Iterable[int]) -> None:
        """These published pages lost their last user."""
        for page in pages:
            node = self._node_of[page]
            node.busy -= 1
            self._offer(node)

    def evict(self) -> list[int]:
        """Take the least recently used idle leaf out; returns its pages, or none if no leaf is idle."""
        while self._idle:
            last_used, _, node = heapq.heappop(self._idle)
            if not self._is_idle_leaf(node):
                continue
            if node.last_used != last_used:  # used since it was offered
                self._offer(node)
                continue
            return self._remove(node)
        return []

    def evict_around_busy(self) -> list[int]:
        """Last resort, when no leaf is idle: take out the least recently used node with an idle page, and all below.

        The idle pages may be used anew; the busy ones among those returned only lose their entry and become private to
        their holders. None if every page is busy.
        """
        candidates = [node for node in set(self._node_of.values()) if node.busy < len(node.pages)]
        if not candidates:
            return []
        return self._remove(min(candidates, key=lambda node: node.last_used))

    def take_out(self, pages: Iterable[int]) -> list[int]:
        """Take out the prefixes that these pages are part of, and all below; returns the pages, busy ones too."""
        taken: list[int] = []
        for page in pages:
            node = self._node_of.get(page)
            if node is not None:
                taken += self._remove(node)
        return taken

    def clear(self) -> list[int]:
        """Take everything out; returns the pages, busy ones included."""
        pages = list(self._node_of)
        if self.changes is not None:
            for namespace, space in self._spaces.items():
                for key in space:
                    self.changes.left(namespace, key)
        self._spaces.clear()
        self._snapshots.clear()
        self._node_of.clear()
        self._idle.clear()
        return pages

    def keys(self) -> Hashes:
        """Every key of every namespace; a node's key stands for its whole prefix."""
        return tuple((namespace, b"".join(space)) for namespace, space in self._spaces.items())

    def check(self, busy_pages: Iterable[int]) -> None:
        """Raises LedgerError unless the tree is sound and its busy counts agree with `busy_pages`."""
        busy: dict[Node, int] = {}
        for page in busy_pages:
            node = self._node_of[page]
            busy[node] = busy.get(node, 0) + 1
        for page, node in self._node_of.items():
            if page not in node.pages or self._trees(node).get(node.namespace, {}).get(node.key) is not node:
                raise LedgerError(f"page {page} is published, but its index node is not in the tree")
            parent = node.parent
            if parent is not None and (
                node not in parent.children or self._spaces.get(parent.namespace, {}).get(parent.key) is not parent
            ):
                raise LedgerError(f"page {page} is published under a prefix that is not")
            if node.busy != busy.get(node, 0):
                raise LedgerError(f"index counts {node.busy} busy pages at page {page}, the ledger {busy.get(node, 0)}")

    # --------------------------------------------------------------------------------------------------------- inside

    def _keys(self, hashes: bytes, max_tokens: int) -> Iterator[bytes]:
        step = self._hashes_per_granule * HASH_BYTES
        for i in range(1, min(max_tokens // self.granule_tokens, len(hashes) // step) + 1):
            yield hashes[i * step - HASH_BYTES : i * step]

    def _touch(self, node: Node) -> None:
        node.last_used = self._tick

    def _trees(self, node: Node) -> dict[bytes, dict[bytes, Node]]:
        return self._snapshots if node.is_snapshot else self._spaces

    def _enter(self, node: Node) -> Node:
        for page in node.pages:
            if page in self._node_of:
                raise LedgerError(f"page {page} is cached for another prefix: nobody may publish it again")
        if node.parent is not None:
            node.parent.children.add(node)
        self._trees(node).setdefault(node.namespace, {})[node.key] = node
        if self.changes is not None and not node.is_snapshot:
            self.changes.entered(node.namespace, node.key)
        self._node_of.update(dict.fromkeys(node.pages, node))
        return node

    def _is_idle_leaf(self, node: Node) -> bool:
        return not node.busy and not node.children and self._node_of.get(node.pages[0]) is node

    def _offer(self, node: Node) -> None:
        if self._is_idle_leaf(node):
            self._serial += 1
            heapq.heappush(self._idle, (node.last_used, self._serial, node))
            if len(self._idle) > 64 + 4 * len(self._node_of):
                self._forget_stale_offers()

    def _forget_stale_offers(self) -> None:
        newest = {node: (last_used, serial, node) for last_used, serial, node in sorted(self._idle, key=lambda e: e[1])}
        self._idle = [entry for entry in newest.values() if self._is_idle_leaf(entry[2])]
        heapq.heapify(self._idle)

    def _remove(self, top: Node) -> list[int]:
        pages: list[int] = []
        below = [top]
        while below:
            node = below.pop()
            below.extend(node.children)
            pages.extend(node.pages)
            for page in node.pages:
                del self._node_of[page]
            trees = self._trees(node)
            space = trees[node.namespace]
            del space[node.key]
            if self.changes is not None and not node.is_snapshot:
                self.changes.left(node.namespace, node.key)
            if not space:
                del trees[node.namespace]
        if top.parent is not None:
            top.parent.children.discard(top)
            self._offer(top.parent)
        return pages
