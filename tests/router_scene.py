"""A router core on a stopped clock, with workers and ingresses that say only what a test makes them say."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tailrace.router.core import RouterCore
from tailrace.router.records import Close, Exit, Send
from tailrace.router.settings import RouterSettings
from tailrace.transfer.messages import (
    Bind,
    Bound,
    CompatRecord,
    Done,
    Heartbeat,
    Held,
    Holding,
    NotNow,
    Place,
    Placed,
    Progress,
    Refused,
    Register,
)

PAGE = 16
COMPAT = CompatRecord(1, "model", "float32", PAGE, 64, (), (PAGE * 1000,), 1, ("raw",))


class Scene:
    """`now` is the clock. Frames that the router sent are in `mail[boot]` until taken."""

    def __init__(self, *, settle=True, boot="router-1", **settings):
        self.now = 1000.0
        self.core = RouterCore(boot, RouterSettings(**settings), lambda: self.now)
        self.state = self.core.state
        self.mail, self.closed, self.exits = {}, [], []
        self.beats, self.registers = {}, {}
        self.settle_s = self.core.settings.settle_s if settle else 0.0
        self.counter = itertools.count()

    # ------------------------------------------------------------------------------------------------------ time, mail

    def pump(self):
        for action in self.core.take():
            if isinstance(action, Send):
                self.mail.setdefault(action.to, []).append(action.frame)
            elif isinstance(action, Close):
                self.closed.append(action.to)
            elif isinstance(action, Exit):
                self.exits.append(action.reason)

    def wait(self, seconds, *, beat=True, step=0.1):
        """Let time pass; living workers keep sending heartbeats unless `beat` is False."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            if beat:
                for boot in list(self.beats):
                    self.beat(boot)
            self.core.tick()
            self.pump()

    def say(self, boot, frame):
        self.core.frame(boot, frame)
        self.pump()

    def taken(self, boot, kind=object):
        """Frames of a kind sent to a boot id and not taken yet."""
        frames = self.mail.get(boot, [])
        found = [f for f in frames if isinstance(f, kind)]
        self.mail[boot] = [f for f in frames if not isinstance(f, kind)]
        return found

    def one(self, boot, kind):
        (frame,) = self.taken(boot, kind)
        return frame

    # --------------------------------------------------------------------------------------------------------- workers

    def worker(self, name, duty, *, boot=None, total=100, rate=1000.0, epoch=(0, ""), beat=True, rows=0, **beats):
        boot = boot or f"{name}-boot"
        self.registers[boot] = Register(
            name,
            boot,
            "gen" if duty == "gen" else "ctx",
            duty,
            "10.0.0.1",
            1,
            total,
            PAGE,
            256,
            4096,
            COMPAT,
            *epoch,
            rows,
        )
        self.core.link_up("gen" if duty == "gen" else "ctx", name, boot)
        self.say(boot, self.registers[boot])
        if beat:
            self.beats[boot] = replace(
                Heartbeat(name, boot, "run", 0.0, total, 0, 0, 0, 0.0, 0, rate, 1e9, ()), **beats
            )
            self.beat(boot)
        return boot

    def beat(self, boot, **changes):
        """Send a heartbeat; changes stay."""
        if changes:
            self.beats[boot] = replace(self.beats[boot], **changes)
        self.say(boot, self.beats[boot])

    def pair(self, *, gens=None, ctxs=None):
        """Every gen (or these) reports usable pairs with every ctx (or these)."""
        of_duty = lambda duty: [b for b in self.beats if self.registers[b].duty == duty]  # noqa: E731
        ctxs = of_duty("ctx") if ctxs is None else ctxs
        for gen in of_duty("gen") if gens is None else gens:
            self.beat(gen, pairs=tuple(ctxs))

    def down(self, boot):
        """Its link is gone and it says nothing more."""
        self.beats.pop(boot, None)
        self.core.link_down(boot)
        self.pump()

    def held(self, boot, *entries, seen=0, seconds_left=0.0):
        """Whole set of a worker: (key, leg, pages, tokens that need gen pages) each."""
        sets = tuple(Held(*key, pages, needs, leg, seconds_left) for key, leg, pages, needs in entries)
        self.say(boot, Holding(self.registers[boot].worker, boot, seen, sets))

    def cluster(self, num_ctx, num_gen, **more):
        """Paired ctx and gen workers, and the router settled. Returns (ctx boots, gen boots)."""
        ctxs = [self.worker(f"ctx-{i}", "ctx", **more) for i in range(num_ctx)]
        gens = [self.worker(f"gen-{i}", "gen", **more) for i in range(num_gen)]
        self.pair()
        self.wait(self.settle_s)
        self.mail.clear()
        return ctxs, gens

    # -------------------------------------------------------------------------------------------------------- requests

    def ingress(self, boot="ingress-1"):
        self.core.link_up("ingress", boot, boot)
        self.pump()
        return boot

    def place(self, request=None, *, ingress="ingress-1", attempt=1, tokens=100, max_new=50, samples=1, **more):
        """Send a Place; returns the key. `more`: further fields of Place."""
        if ingress not in self.state.ingresses:
            self.ingress(ingress)
        request = request or f"r{next(self.counter)}"
        fields = {
            "hashes": b"", "tenant": "", "priority": 0, "deadline_s": None, "conversation": None, "deaths": 0,
            "namespace": b"n", "exclude": (), "at": "",
        } | more  # fmt: skip
        self.say(ingress, Place(request, attempt, tokens, max_new, samples, **fields))
        return (request, attempt)

    def placed(self, ingress="ingress-1"):
        return self.taken(ingress, Placed)

    def refused(self, ingress="ingress-1"):
        return self.taken(ingress, Refused)

    def progress(self, key, *, ready=None, total=100, seconds_left=0.0, last=True):
        """From the ctx that the router believes has it."""
        boot = self.state.records[key].worker
        self.say(boot, Progress(*key, total if ready is None else ready, total, seconds_left, last))

    def bind(self, key):
        """Bring a placed request to bound; returns the gen's boot id."""
        tokens = self.state.records[key].place.num_tokens
        self.progress(key, total=tokens)
        gen = self.asked(key)
        self.say(gen, Bound(*key, self.state.records[key].pages))
        return gen

    def asked(self, key):
        """The gen that has an unanswered Bind for the key."""
        return self.state.records[key].pending.gen

    def binds(self, boot):
        return self.taken(boot, Bind)

    def not_now(self, key, *, why="pages", free=0, retry_s=0.2):
        gen = self.asked(key)
        self.say(gen, NotNow(*key, why, 1, free, retry_s))
        return gen

    def done(self, key, outcome="finished", ingress="ingress-1"):
        self.say(ingress, Done(*key, outcome, ""))

    def assert_quiet(self):
        """Nothing is claimed and nothing is believed."""
        self.core.check()
        state = self.state
        assert not state.records and not state.unbound and not len(state.queue)
        assert state.prefill.sum == state.pages.sum == state.seats.sum == 0
        assert all(not ingress.keys for ingress in state.ingresses.values())
