"""Flows, a router core and fake workers on one clock, with a queue for every link: for the machine that breaks them.

The flow (one ingress) and the core are the product's own. A worker here says what a real one would, no sooner than its
messages have come, and forgets all when it dies. Tokens are a function of request, sample and position, so that a
repeat or a gap in a stream is seen at once. Each link is in order; between links any order is possible.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from tailrace.model.sampling_params import SamplingParams
from tailrace.router.attempt import ToRouter
from tailrace.router.core import RouterCore
from tailrace.router.detokenize import TextStream, TokenTable
from tailrace.router.flow import Flow, FlowPolicy, Spec
from tailrace.router.records import Close, Exit, Send
from tailrace.router.sample import Sample
from tailrace.router.settings import RouterSettings
from tailrace.router.told import Told
from tailrace.transfer.messages import (
    NOT_HELD,
    Bind,
    Bound,
    Cancel,
    CompatRecord,
    Deaths,
    Delta,
    Done,
    Epoch,
    EpochRefused,
    Fail,
    Heartbeat,
    Held,
    Holding,
    NotNow,
    Placed,
    Progress,
    Refused,
    Register,
    Renew,
    Submit,
    pack_ids,
    unpack_ids,
)

PAGE = 16
COMPAT = CompatRecord(1, "model", "float32", PAGE, 64, (), (PAGE * 1000,), 1, ("raw",))
INGRESS, LEASE_S, BEAT_S, HOLDING_S = "ingress-1", 3.0, 0.2, 1.0


class Letters:
    vocab_size = 26
    special_ids = frozenset()

    def id_to_bytes(self, token):
        return bytes([ord("a") + token])


TABLE = TokenTable(Letters())


def token(number: int, sample: int, position: int) -> int:
    return (7 * number + 5 * sample + 3 * position + position * position) % 26


@dataclass
class Job:
    """An attempt at a worker. state: queued | prefilled | reading | decoding."""

    submit: Submit | None
    state: str
    renewed: float
    reader: str = ""  # on ctx: boot of the gen that reads it
    ctx: str = ""  # on gen: boot of the ctx that it reads from
    attached: bool = False  # the ingress listens
    pages: int = 0
    sent: dict[int, int] = field(default_factory=dict)  # sample -> tokens so far
    ended: set[int] = field(default_factory=set)


class Worker:
    """`boot` changes with each start; `frozen`: it neither takes nor says anything."""

    def __init__(self, world, name, total):
        self.world, self.name, self.total = world, name, total
        self.duty = name.split("-")[0]
        self.epoch = (0, "")
        self.frozen = self.linked = self.alive = False
        self.start()

    def start(self):
        self.boot = f"{self.name}#{next(self.world.counter)}"
        self.alive, self.frozen, self.linked, self.seen = True, False, False, 0
        self.jobs: dict[tuple[str, int], Job] = {}
        self.told_dead: set[str] = set()

    @property
    def free(self):
        return self.total - sum(job.pages for job in self.jobs.values())

    def say(self, frame):
        if self.linked:
            self.world.send(self.boot, "router", frame)

    def tell(self, frame):
        self.world.send(self.boot, INGRESS, frame)

    # ------------------------------------------------------------------------------------------------------ frames in

    def take(self, sender, frame):
        match frame:
            case Submit():
                job = Job(frame, "queued", self.world.now, attached=True)
                job.sent = dict.fromkeys(self.samples(frame), len(unpack_ids(frame.output_ids)))
                if self.duty == "gen":
                    job.pages = 2
                self.jobs[frame.request, frame.attempt] = job
            case Cancel():
                self.drop((frame.request, frame.attempt))
            case Renew():
                for key in frame.keys:
                    if key in self.jobs:
                        self.jobs[key].renewed, self.jobs[key].attached = self.world.now, True
                    else:
                        self.tell(Fail(*key, NOT_HELD, "", True))
            case Bind():
                self.bind(frame)
            case Deaths():
                self.told_dead.update(frame.boots)
                if self.boot in frame.boots:
                    self.world.kill(self.name)
            case Epoch():
                if frame.number < self.epoch[0] or (
                    frame.number == self.epoch[0] and frame.router_boot != self.epoch[1]
                ):
                    self.say(EpochRefused(*self.epoch))
                else:
                    self.epoch = (frame.number, frame.router_boot)

    def bind(self, frame):
        self.seen, key = frame.seq, (frame.request, frame.attempt)
        if key in self.jobs:
            self.say(Bound(*key, self.jobs[key].pages))
        elif frame.ctx.boot in self.told_dead:
            self.say(NotNow(*key, "pair", 2, self.free, 0.1))
        elif self.free < 2:
            self.say(NotNow(*key, "pages", 2, self.free, 0.1))
        else:
            self.jobs[key] = Job(None, "reading", self.world.now, ctx=frame.ctx.boot, pages=2)
            ctx = self.world.at(frame.ctx.boot)
            if ctx is not None and key in ctx.jobs:
                ctx.jobs[key].reader = self.boot
            self.say(Bound(*key, 2))

    def drop(self, key):
        job = self.jobs.pop(key, None)
        if job is not None and job.state == "reading":
            ctx = self.world.at(job.ctx)
            if ctx is not None and key in ctx.jobs and ctx.jobs[key].reader == self.boot:
                ctx.jobs[key].reader = ""

    # ------------------------------------------------------------------------------------------------------------ work

    @staticmethod
    def samples(submit):
        return range(submit.first_sample, submit.first_sample + submit.samples)

    def work(self, key):
        """One step of an attempt."""
        job = self.jobs.get(key)
        if job is None or self.frozen:
            return
        if job.state == "reading":
            self.read(key, job)
        elif job.state == "queued":
            if not job.submit.left_to_gen:
                self.emit(key, job)
            job.state = "prefilled" if self.duty == "ctx" else "decoding"
            if self.duty == "ctx" and len(job.ended) == len(job.sent):
                del self.jobs[key]
        elif job.state == "decoding" and job.attached:
            self.emit(key, job)
            if len(job.ended) == len(job.sent):
                del self.jobs[key]

    def read(self, key, job):
        ctx = self.world.at(job.ctx)
        if ctx is None or (key not in ctx.jobs and job.ctx not in self.told_dead):
            self.fail(key, "lost", True)
        elif key in ctx.jobs and ctx.jobs[key].state == "prefilled" and not ctx.frozen:
            src = ctx.jobs.pop(key)
            job.submit, job.sent, job.ended, job.state = src.submit, src.sent, src.ended, "decoding"

    def emit(self, key, job):
        number, most = int(key[0][1:]), job.submit.params.max_tokens
        for sample in self.samples(job.submit):
            if sample in job.ended:
                continue
            at = job.sent[sample]
            job.sent[sample] += 1
            finish = "length" if at + 1 >= most else None
            if finish:
                job.ended.add(sample)
            ids = pack_ids([token(number, sample, at)])
            self.tell(Delta(*key, sample, at, ids, (), finish, None, (), 0, {}))

    def fail(self, key, code, retryable):
        self.drop(key)
        self.tell(Fail(*key, code, "", retryable))

    # ------------------------------------------------------------------------------------------------------------ time

    def tick(self):
        now = self.world.now
        for key, job in list(self.jobs.items()):
            if now - job.renewed > LEASE_S:
                self.fail(key, "lost", True)  # an ingress that lives all the same is told
                continue
            reader = self.world.at(job.reader) if job.reader else None
            if job.reader and (reader is None or key not in reader.jobs):
                job.reader = ""
        for key, job in self.jobs.items():
            if self.duty == "ctx" and not job.reader:
                total = (len(job.submit.prompt_ids) + len(job.submit.output_ids)) // 4
                done = job.state == "prefilled"
                self.say(Progress(*key, total if done else 0, total, 0.0, done))

    def beat(self):
        pairs = tuple(w.boot for w in self.world.workers.values() if w.duty == "ctx" and w.alive)
        pairs = tuple(b for b in pairs if b not in self.told_dead) if self.duty == "gen" else ()
        self.say(Heartbeat(self.name, self.boot, "run", 0.0, self.free, 0, 0, 0, 0.0, 0, 1000.0, 1e9, pairs))

    def hold(self):
        held = []
        for key, job in self.jobs.items():
            leg = "prefill" if self.duty == "ctx" else "local" if job.ctx == "" else "decode"
            needs = 32 if self.duty == "ctx" and not job.reader else 0
            held.append(Held(*key, job.pages, needs, leg, 0.0))
        self.say(Holding(self.name, self.boot, self.seen, tuple(held)))


class World:
    """See the module. `links[a, b]`: frames on their way."""

    def __init__(self, *, total=40, names=("ctx-0", "ctx-1", "gen-0", "gen-1"), policy=None, **settings):
        self.now, self.counter = 1000.0, itertools.count(1)
        self.settings = RouterSettings(
            **{
                "local_prefill_max_tokens": 0, "request_lease_s": LEASE_S, "heartbeat_s": BEAT_S, "settle_s": 0.3,
                "max_wait_s": 20.0, "redial_grace_s": 1.0, "dead_after_s": 5.0,
            } | settings
        )  # fmt: skip
        self.policy = policy or FlowPolicy(router_wait_s=3.0, rebind_wait_s=4.0, request_lease_s=LEASE_S)
        self.links: dict[tuple[str, str], list[object]] = {}
        self.flows: dict[str, Flow] = {}
        self.ends: dict[str, object] = {}
        self.dones: dict[tuple[str, int], str] = {}
        self.told = Told(LEASE_S)
        self.gone: set[str] = set()  # boots that the ingress holds for dead
        self.router: RouterCore | None = None
        self.router_linked = False
        self.workers = {}
        self.beat_at = self.hold_at = self.renew_at = self.now
        self.start_router()
        for name in names:
            self.workers[name] = Worker(self, name, total)
            self.dial(name)

    def at(self, boot):
        return next((w for w in self.workers.values() if w.alive and w.boot == boot), None)

    # ----------------------------------------------------------------------------------------------------------- links

    def send(self, src, dst, frame):
        self.links.setdefault((src, dst), []).append(frame)

    def deliver(self, link):
        """The oldest frame of a link arrives; frames for the frozen stay where they are."""
        frames = self.links.get(link)
        if not frames:
            return
        src, dst = link
        worker = self.at(dst)
        if worker is not None and worker.frozen:
            return
        frame = frames.pop(0)
        if not frames:
            del self.links[link]
        if dst == "router":
            if self.router is not None:
                self.router.frame(src, frame)
                self.act()
        elif dst == INGRESS:
            self.ingress_takes(src, frame)
        elif worker is not None:
            worker.take(src, frame)
        elif src == INGRESS and dst not in self.gone:
            self.lose(dst, dead=True, reached=True)

    def cut(self, *ends):
        """What is under way between these is lost."""
        for link in [k for k in self.links if set(k) & set(ends)]:
            del self.links[link]

    def deliver_all(self):
        for _ in range(10_000):
            open_links = [k for k in self.links if not ((w := self.at(k[1])) is not None and w.frozen)]
            if not open_links:
                return
            for link in open_links:
                self.deliver(link)
        raise AssertionError("frames for ever")

    # ---------------------------------------------------------------------------------------------------------- router

    def start_router(self):
        self.router = RouterCore(f"router#{next(self.counter)}", self.settings, lambda: self.now)

    def kill_router(self):
        self.router, self.router_linked = None, False
        self.cut("router")
        for worker in self.workers.values():
            worker.linked = False

    def act(self):
        for action in self.router.take():
            if isinstance(action, Send):
                worker = self.at(action.to)
                if action.to == INGRESS:
                    if self.router_linked:
                        self.send("router", INGRESS, action.frame)
                elif worker is not None and worker.linked:
                    self.send("router", action.to, action.frame)
            elif isinstance(action, Close):
                worker = self.at(action.to)
                if worker is not None:
                    self.kill(worker.name)  # its own boot is dead: it ends and is started again by whoever watches it
            elif isinstance(action, Exit):
                self.kill_router()
                return

    def dial(self, name):
        """A worker links to the router."""
        worker = self.workers[name]
        if self.router is None or not worker.alive or worker.linked or worker.frozen:
            return
        worker.linked = True
        role = "ctx" if worker.duty == "ctx" else "gen"
        self.router.link_up(role, name, worker.boot)
        worker.say(
            Register(name, worker.boot, role, worker.duty, "h", 1, worker.total, PAGE, 256, 4096, COMPAT, *worker.epoch)
        )
        worker.beat()
        worker.hold()

    def undial(self, name):
        worker = self.workers[name]
        if worker.linked:
            worker.linked = False
            self.cut_pair(worker.boot, "router")
            if self.router is not None:
                self.router.link_down(worker.boot)
                self.act()

    def cut_pair(self, a, b):
        self.links.pop((a, b), None)
        self.links.pop((b, a), None)

    # --------------------------------------------------------------------------------------------------------- workers

    def kill(self, name):
        """As SIGKILL: the links break, and whoever has one finds out in his own time."""
        worker = self.workers[name]
        if not worker.alive:
            return
        self.undial(name)
        worker.alive = False
        worker.jobs.clear()
        self.cut(worker.boot)

    def restart(self, name):
        if not self.workers[name].alive:
            self.workers[name].start()
            self.dial(name)

    # --------------------------------------------------------------------------------------------------------- ingress

    def ingress_dials(self):
        if self.router is None or self.router_linked:
            return
        self.router_linked = True
        self.router.link_up("ingress", INGRESS, INGRESS)
        self.act()
        if self.gone:
            self.send(INGRESS, "router", Deaths(tuple(sorted(self.gone))))
        for frame in self.told.again(self.now):
            self.send(INGRESS, "router", frame)
        for flow in list(self.flows.values()):
            if not flow.ended:
                self.perform(flow, flow.router_up(self.now))

    def ingress_loses_router(self):
        if self.router_linked:
            self.router_linked = False
            self.cut_pair("router", INGRESS)
            if self.router is not None:
                self.router.link_down(INGRESS)
                self.act()

    def ask(self, number, prompt, max_tokens, samples, deadline=None):
        name = f"r{number}"
        spec = Spec(
            name, [1] * prompt, pack_ids([1] * prompt), SamplingParams(max_tokens=max_tokens, seed=1), samples, b"",
            lambda ids: b"", b"n", deadline=None if deadline is None else self.now + deadline,
        )  # fmt: skip
        made = [Sample(i, TextStream(TABLE, None)) for i in range(samples)]
        flow = self.flows[name] = Flow(spec, self.policy, made, self.now)
        self.perform(flow, flow.start())

    def perform(self, flow, actions):
        for action in actions:
            if isinstance(action, ToRouter):
                frame = action.frame
                if isinstance(frame, Done):
                    key = (frame.request, frame.attempt)
                    assert key not in self.dones, f"{key} ended twice: {self.dones[key]}, {frame.outcome}"
                    self.dones[key] = frame.outcome
                    self.told.note(frame, self.now)
                if self.router_linked:
                    self.send(INGRESS, "router", frame)
            elif action.leg.boot in self.gone:
                self.lose(action.leg.boot, dead=True, reached=False)
            else:
                self.send(INGRESS, action.leg.boot, action.frame)
        self.look(flow)

    def look(self, flow):
        """What must hold of a flow at any time."""
        number = int(flow.spec.request[1:])
        for sample in flow.samples:
            expected = [token(number, sample.index, i) for i in range(len(sample.ids))]
            assert sample.ids == expected, f"{flow.spec.request}/{sample.index}: {sample.ids}, not {expected}"
        if flow.ended:
            before = self.ends.setdefault(flow.spec.request, flow.state)
            assert before is flow.state and not flow.held() and not flow.attempts
        else:
            covered = [s.index for a in flow.attempts.values() for s in a.samples if s.finish is None]
            assert sorted(covered) == [s.index for s in flow.samples if s.finish is None]

    def ingress_takes(self, src, frame):
        if isinstance(frame, Deaths):
            for boot in frame.boots:
                self.lose(boot, dead=True, reached=True)
            return
        flow = self.flows.get(frame.request)
        if flow is None:
            return
        if isinstance(frame, Placed):
            actions = flow.on_placed(frame, self.now)
        elif isinstance(frame, Refused):
            actions = flow.on_refused(frame, self.now)
        elif isinstance(frame, Delta):
            actions = flow.on_delta(src, frame, self.now)
        else:
            actions = flow.on_fail(src, frame, self.now)
        self.perform(flow, actions)

    def lose(self, boot, *, dead, reached):
        """The ingress's link to a worker breaks; or it learns that the worker is dead."""
        self.cut_pair(boot, INGRESS)
        if dead and boot not in self.gone:
            self.gone.add(boot)
            if self.router_linked:
                self.send(INGRESS, "router", Deaths((boot,)))
        for flow in list(self.flows.values()):
            self.perform(flow, flow.on_gone(boot, self.now, dead=dead, reached=reached))

    def cancel(self, name):
        flow = self.flows[name]
        self.perform(flow, flow.cancel("client"))

    # ------------------------------------------------------------------------------------------------------------ time

    def pass_time(self, seconds):
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            self.tick()

    def tick(self):
        now = self.now
        for flow in list(self.flows.values()):
            if not flow.ended:
                self.perform(flow, flow.tick(now, router_up=self.router_linked))
        if now - self.renew_at >= LEASE_S / 3:
            self.renew_at = now
            for flow in self.flows.values():
                for leg, key in flow.held():
                    if leg.boot not in self.gone:
                        self.send(INGRESS, leg.boot, Renew((key,), LEASE_S))
        beats, holds = now - self.beat_at >= BEAT_S, now - self.hold_at >= HOLDING_S
        self.beat_at, self.hold_at = now if beats else self.beat_at, now if holds else self.hold_at
        for worker in self.workers.values():
            if worker.alive and not worker.frozen:
                worker.tick()
                if beats:
                    worker.beat()
                if holds:
                    worker.hold()
        if self.router is not None:
            self.router.tick()
            self.act()

    def heal(self, limit_s=120.0, at_least_s=0.0):
        """All is well from now on: everybody lives, is linked, works. Returns how long it took until all was quiet."""
        begun = self.now
        while self.now - begun < limit_s:
            if self.router is None:
                self.start_router()
            self.ingress_dials()
            for name, worker in self.workers.items():
                worker.frozen = False
                self.restart(name)
                self.dial(name)
            self.deliver_all()
            for worker in self.workers.values():
                for key in list(worker.jobs):
                    worker.work(key)
            self.deliver_all()
            if not self.disquiet() and self.now - begun >= at_least_s:
                return self.now - begun
            self.pass_time(0.1)
        raise AssertionError(f"not quiet after {limit_s} s: {self.disquiet()}")

    def disquiet(self):
        """What has not ended or is still held somewhere."""
        found = [f"{n} is {f.state}: {f.attempts}" for n, f in self.flows.items() if not f.ended]
        found += [f"{w.name} has {w.jobs}" for w in self.workers.values() if w.jobs]
        if self.router is not None:
            self.router.check()
            state = self.router.state
            found += [f"record {r}" for r in state.records.values()]
            books = (state.prefill, state.pages, state.seats, state.migrations.in_flight)
            found += [f"claims of {b.kind}" for b in books if len(b)]
        return found
