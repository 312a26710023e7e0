"""Clients and workers in simulated time around a router core: saturating tenants, overload."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict

from router_scene import Scene

from tailrace.router.tenants import Share
from tailrace.transfer.messages import Bound, Done, Placed, Progress

SHARES = {"big": Share(4.0), "small": Share(1.0), "metered": Share(1.0, 500.0)}
ROWS, TOKENS_PER_S, TOKEN_S = 16, 20_000.0, 0.02


class Load(Scene):
    """Two ctx that prefill at TOKENS_PER_S, a gen of ROWS rows that takes TOKEN_S a token, and clients that ask again
    as soon as they have their answer. Refused ones ask again after their Retry-After."""

    def __init__(self, *, rows=ROWS, **more):
        super().__init__(tenants=SHARES, local_prefill_max_tokens=0, **more)
        self.ctxs = [self.worker(f"ctx-{i}", "ctx", total=100_000, rate=TOKENS_PER_S) for i in range(2)]
        self.gen = self.worker("gen-0", "gen", total=100_000, rows=rows)
        self.pair()
        self.wait(self.settle_s)
        self.mail.clear()
        self.events, self.order, self.busy_until = [], itertools.count(), dict.fromkeys(self.ctxs, 0.0)
        self.asked, self.served, self.waits, self.refusals = {}, Counter(), defaultdict(list), Counter()
        self.first_s = []  # time to the first token, of each request that had one
        self.random = random.Random(7)

    def at(self, when, act):
        heapq.heappush(self.events, (when, next(self.order), act))

    def client(self, tenant, shape, **more):
        """`shape()` -> prompt and output tokens of its next request."""

        def ask():
            tokens, output = shape()
            key = self.place(tokens=tokens, max_new=1000, tenant=tenant, attempt=1, **more)
            self.asked[key] = (tenant, tokens, output, self.now, ask)

        self.at(self.now, ask)

    def react(self):
        for frame in self.placed():
            if frame.leg == "prefill":
                self.prefill(frame)
        for frame in self.refused():
            tenant, *_, ask = self.asked.pop((frame.request, frame.attempt))
            self.refusals[tenant, frame.reason] += 1
            if ask is not None:
                self.at(self.now + frame.retry_after_s, ask)

    def prefill(self, placed: Placed):
        key = (placed.request, placed.attempt)
        tenant, tokens, output, since, _ = self.asked[key]
        self.waits[tenant].append(self.now - since)
        end = max(self.now, self.busy_until[placed.boot]) + tokens / TOKENS_PER_S
        self.busy_until[placed.boot] = end

        def prefilled():
            self.first_s.append(self.now - since)
            self.say(placed.boot, Progress(*key, tokens, tokens, 0.0, True))
            self.say(self.gen, Bound(*key, self.state.records[key].pages))
            self.at(self.now + output * TOKEN_S, done)

        def done():
            tenant, tokens, output, _, ask = self.asked.pop(key)
            self.served[tenant] += tokens + output
            self.say("ingress-1", Done(*key, "finished", "", (), None, tokens, output))
            if ask is not None:
                ask()

        self.at(end, prefilled)

    def arrivals(self, per_s, seconds, tokens, output):
        """Clients that ask once each, at even distances."""
        begin = self.now

        def ask():
            key = self.place(tokens=tokens, max_new=output, attempt=1)
            self.asked[key] = ("", tokens, output, self.now, None)

        for number in range(int(per_s * seconds)):
            self.at(begin + number / per_s, ask)

    def run(self, seconds):
        end, beat = self.now + seconds, self.now
        while True:
            when = min(self.events[0][0] if self.events else end, beat)
            if when >= end:
                break
            self.now = max(self.now, when)
            if when == beat:
                beat += 0.5
                for boot in list(self.beats):
                    self.beat(boot)
                self.core.tick()
                self.pump()
            else:
                heapq.heappop(self.events)[2]()
            self.react()
        self.now = end
