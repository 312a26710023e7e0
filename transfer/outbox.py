"""Tokens on their way to ingresses: one merged delta a sample while its link is absent or full, one frame a link.

A stream's unsent tokens merge, so memory is bounded by max_tokens a sample. Knows no socket: links are opaque handles
that the owner compares. What no ingress fetches within its request lease is dropped. Dies with its worker; the ingress,
which owns the request, then makes a new attempt from what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import ID_BYTES, NOT_HELD, Delta, Fail, Tokens


@dataclass(slots=True)
class _Route:
    """Where the tokens of one key go, and those still here. `until`: None while the worker works on the key."""

    link: Hashable | None
    deltas: dict[int, list[Delta]] = field(default_factory=dict)  # sample -> in order, merged where they join
    fail: Fail | None = None
    until: float | None = None

    @property
    def empty(self) -> bool:
        return not self.deltas and self.fail is None


def merge(first: Delta, second: Delta) -> Delta | None:
    """Two deltas of one sample as one, or None if `second` does not begin where `first` ends."""
    if second.start != first.start + len(first.ids) // ID_BYTES or first.finish is not None:
        return None
    return replace(
        first,
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        finish=second.finish,
        stop_id=second.stop_id,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        stamps={**second.stamps, **first.stamps},
        moved=first.moved or second.moved,
    )


class Outbox:
    """Routes by key; a route exists from the first attach or put until all is fetched after `end`, or its time ends.

    Args:
        keep_s: how long tokens of a key that ended wait for a link.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._routes: dict[Key, _Route] = {}
        self._waiting: dict[Key, None] = {}  # keys whose route is not empty, in order

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def pending(self) -> bool:
        """Whether anything is waiting for a link that takes it."""
        return bool(self._waiting)

    @property
    def waits_for_link(self) -> bool:
        """Whether something is kept back by a link that is there but full."""
        return any(self._routes[key].link is not None for key in self._waiting)

    def attach(self, key: Key, link: Hashable) -> None:
        """Tokens of `key` go to `link` from now on."""
        route = self._routes.get(key)
        if route is None:
            self._routes[key] = _Route(link)
        else:
            route.link = link

    def reattach(self, key: Key, link: Hashable) -> bool:
        """As `attach`, but for keys that are known here only. Returns whether something waits for it."""
        route = self._routes.get(key)
        if route is not None:
            route.link = link
        return route is not None and not route.empty

    def deny(self, key: Key, link: Hashable, now: float) -> None:
        """Tell who asked for a key that nothing of it is here."""
        self.attach(key, link)
        self.put(key, Fail(*key, NOT_HELD, "not held here (any more)", True))
        self.end(key, now)

    def detach(self, link: Hashable) -> None:
        """The link is gone; its keys wait for another."""
        for route in self._routes.values():
            if route.link == link:
                route.link = None

    def put(self, key: Key, item: Delta | Fail) -> None:
        route = self._routes.setdefault(key, _Route(None))
        self._waiting[key] = None
        if isinstance(item, Fail):
            route.fail = item
            return
        deltas = route.deltas.setdefault(item.sample, [])
        merged = merge(deltas[-1], item) if deltas else None
        if merged is None:
            deltas.append(item)
        else:
            deltas[-1] = merged

    def end(self, key: Key, now: float) -> None:
        """Nothing more will be put for this key."""
        route = self._routes.get(key)
        if route is None:
            return
        if route.empty:
            del self._routes[key]
        else:
            route.until = now + self._keep_s

    def drop(self, key: Key) -> None:
        """Forget a key and what waits for it: it was cancelled."""
        self._routes.pop(key, None)
        self._waiting.pop(key, None)

    def expire(self, now: float, in_work: Callable[[Key], bool]) -> None:
        """End the routes of keys that are no longer in work, and drop what nobody fetched in time."""
        for key in [k for k, route in self._routes.items() if route.until is None and not in_work(k)]:
            self.end(key, now)
        for key in [k for k, route in self._routes.items() if route.until is not None and route.until <= now]:
            self.drop(key)

    def flush(self, takes: Callable[[Any], bool]) -> Iterator[tuple[Any, Tokens | Fail]]:
        """(link, frame) for all that can go now: one Tokens a link, then the Fails.

        Args:
            takes: whether a link is open and not full.
        """
        tokens: dict[Any, list[Delta]] = {}
        fails: list[tuple[Any, Fail]] = []
        for key in list(self._waiting):
            route = self._routes[key]
            if route.link is None or not takes(route.link):
                continue
            tokens.setdefault(route.link, []).extend(d for deltas in route.deltas.values() for d in deltas)
            if route.fail is not None:
                fails.append((route.link, route.fail))
            route.deltas, route.fail = {}, None
            del self._waiting[key]
            if route.until is not None:
                del self._routes[key]
        for link, deltas in tokens.items():
            if deltas:
                yield link, Tokens(tuple(deltas))
        yield from fails
