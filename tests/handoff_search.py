"""Every state that a small world can reach, each looked at once.

    breadth first: take a state, make each move that is possible in it, keep what comes of it if it was not seen before

Two things are held: in no state is a law broken (tests/small_scope.py looks at each worker's, here is the world's), and
from every state the quiet end can be reached without another fault. What is found is the shortest history that leads
there, told move by move.

Order of things: what one process says to another arrives in the order in which it was said, and nothing else is
ordered. A step of time is taken when nothing else can happen, and then what is late may come, and who was stopped goes
on. Faults (FAULTS of small_scope.py) may happen at any time, as many as the scope allows in one history.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from handoff_sim import NAMESPACE
from small_scope import (
    OLD,
    STEP,
    Agent,
    Air,
    Broken,
    Copy,
    Ctx,
    Decoded,
    Disconnected,
    Gen,
    Known,
    Land,
    Mapped,
    Node,
    Pack,
    Passed,
    Posted,
    Scope,
    submit_of,
)

from tailrace.transfer import core_events as ce
from tailrace.transfer.messages import Bind, Bound, Cancel, Deaths, NotNow, PeerAddress, Progress, Renew
from tailrace.transfer.transports.base import LandedIn

TEMPORARY = ("pages", "headroom", "pair", "draining")  # why a gen may take later what it does not take now


class Asked(NamedTuple):
    """A request as its ingress and the router see it. `bind`: idle | asked | again (at the next step) | bound."""

    name: str
    attempt: int = 0
    ctx: str = ""
    gen: str = ""
    bind: str = "idle"
    outcome: str = ""
    decoding: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.name, self.attempt)


class State(NamedTuple):
    """A world as a value. Workers, frames and events are numbers that `Known` gave them."""

    parts: tuple[tuple[str, int], ...]  # (boot, node), the living last of each role
    dead: frozenset[str]
    stopped: frozenset[str]
    inboxes: tuple[tuple[tuple[str, str], tuple[int, ...]], ...]  # (to, from) -> what was said, in order
    air: tuple[int, ...]
    late: tuple[tuple[str, str, int], ...]
    agents: tuple[tuple[tuple[str, str], int], ...]  # (gen, ctx) -> agents destroyed
    unpaired: tuple[tuple[str, str], ...]  # (gen, ctx) to be paired with anew
    asked: tuple[Asked, ...]
    faults: int
    ended: int  # steps since all requests ended


class World:
    """One state taken apart, to be changed by one move. `state` puts it together again."""

    def __init__(self, known: Known, nodes: list[Node], state: State | None = None) -> None:
        self.known, self.nodes, self.scope = known, nodes, known.scope
        if state is None:
            self.parts: dict[str, Node] = {}
            self.dead, self.stopped = set(), set()
            self.inboxes: dict[tuple[str, str], tuple[int, ...]] = {}
            self.air: list[int] = []
            self.late: list[tuple[str, str, int]] = []
            self.agents: dict[tuple[str, str], int] = {}
            self.unpaired: list[tuple[str, str]] = []
            self.asked = {f"r{i}": Asked(f"r{i}") for i in range(self.scope.requests)}
            self.faults, self.ended = self.scope.faults, 0
            self.begin()
            return
        self.parts = {boot: nodes[number] for boot, number in state.parts}
        self.dead, self.stopped = set(state.dead), set(state.stopped)
        self.inboxes, self.air, self.late = dict(state.inboxes), list(state.air), list(state.late)
        self.agents, self.unpaired = dict(state.agents), list(state.unpaired)
        self.asked = {asked.name: asked for asked in state.asked}
        self.faults, self.ended = state.faults, state.ended

    def state(self) -> State:
        return State(
            tuple((boot, node.number) for boot, node in self.parts.items()),
            frozenset(self.dead), frozenset(self.stopped),
            tuple(sorted(self.inboxes.items())), tuple(sorted(self.air)), tuple(sorted(self.late)),
            tuple(sorted(self.agents.items())), tuple(self.unpaired), tuple(self.asked.values()),
            self.faults, self.ended,
        )  # fmt: skip

    def begin(self) -> None:
        for role in ("c", "g"):
            self.start(role, 1)
        for asked in list(self.asked.values()):
            self.place(asked)
        while self.inboxes:  # nothing can come before these
            self.deliver(next(iter(self.inboxes)))

    # ----------------------------------------------------------------------------------------------------------- moves

    def moves(self) -> Iterator[tuple[str, str, tuple[Any, ...], bool]]:
        """(what happens, method of World, its arguments, is it a fault)."""
        busy = False
        for name, call, args in self._plain_moves():
            busy = True
            yield name, call, args, False
        if not busy:
            for name, call, args in self._moves_of_rest():
                yield name, call, args, False
        if self.faults:
            for name, call, args in self._fault_moves():
                yield name, call, args, True

    def _plain_moves(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        for (boot, source), items in self.inboxes.items():
            if boot not in self.stopped:
                yield f"{boot} gets {self.called(items[0])} of {source}", "deliver", ((boot, source),)
        for boot, node in self.parts.items():
            if boot in self.dead or boot in self.stopped:
                continue
            for move in node.moves:
                if isinstance(move, int):
                    word, call = ("packs", "pack") if boot[0] == "c" else ("ends copy", "copy")
                    yield f"{boot} {word} {move}", call, (boot, move)
                else:
                    yield f"{boot}: {move}", "happen", (boot, move)
        for air in self.air:
            yield f"{self.called(air)} lands", "land", (air, 1)

    def _moves_of_rest(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        for boot in sorted(self.stopped):
            yield f"{boot} goes on", "go_on", (boot, True)
            yield f"{boot} goes on, its leases over", "go_on", (boot, False)
            yield f"{boot} is declared dead", "kill", (boot,)
        for entry in self.late:
            yield f"late {self.called(entry[2])} reaches {entry[0]}", "arrive_late", (entry,)
        if not self.quiet:
            yield "a step", "step", ()

    def _fault_moves(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        kinds = self.scope.kinds
        for (boot, source), items in self.inboxes.items():
            if source in ("ingress", "router", "wire"):
                continue
            what = f"{self.called(items[0])} of {source} to {boot}"
            if "drop" in kinds:
                yield f"drop {what}", "take", ((boot, source),)
            if "duplicate" in kinds and boot not in self.stopped:
                yield f"duplicate {what}", "deliver", ((boot, source), True)
            if "late" in kinds:
                yield f"late: {what}", "delay", ((boot, source),)
        for air in self.air:
            for kind, notices in (("drop", 0), ("duplicate", 2), ("late", -1)):
                if kind in kinds:
                    yield f"{kind} the notice of {self.called(air)}", "land", (air, notices)
        for boot in [boot for boot in self.parts if boot not in self.dead]:
            if "stop" in kinds and boot not in self.stopped:
                yield f"stop {boot}", "stop", (boot,)
            if "kill" in kinds:
                yield f"kill {boot}", "kill", (boot,)
        if "cancel" in kinds:
            for asked in self.asked.values():
                if not asked.outcome:
                    yield f"cancel {asked.name}", "cancel", (asked.name,)

    def called(self, number: int) -> str:
        item = self.known.items[number]
        while hasattr(item, "frame"):
            item = item.frame
        return f"write of {item.src}" if isinstance(item, Air) else type(item).__name__

    # ------------------------------------------------------------------------------------------------ workers, frames

    def happen(self, boot: str, item: Any) -> None:
        self.run(boot, self.known.number(item))

    def run(self, boot: str, number: int) -> None:
        """Something happens to a worker; what it says goes where it belongs."""
        self.parts[boot], said = self.known.after(self.parts[boot], number)
        for word in said:
            self.hear(boot, word)

    def hear(self, boot: str, number: int) -> None:
        item = self.known.items[number]
        match item:
            case ce.ToPeer():
                if item.boot not in self.dead:
                    self.put(item.boot, boot, self.known.number(ce.FromPeer(boot, item.frame)))
            case ce.ToRouter():
                self.router(boot, item.frame)
            case ce.ToIngress():
                self.ingress(item.item)
            case Decoded():
                asked = self.asked[item.key[0]]
                if asked.key == item.key and not asked.outcome:
                    self.over(asked, "finished")
            case Disconnected():
                pair = (boot, item.boot)
                self.agents[pair] = self.agents.get(pair, 0) + 1
                self.lose_air(lambda air: (air.dst, air.src) == pair)
                if item.reset:  # its link is closed too: what was on it is lost
                    self.unpaired.append(pair)
                    for queue in (pair, pair[::-1]):
                        self.inboxes.pop(queue, None)
                    self.late = [entry for entry in self.late if entry[:2] not in (pair, pair[::-1])]
            case (str(), int()):  # admitted
                asked = self.asked[item[0]]
                if asked.key == item:
                    self.asked[asked.name] = asked._replace(decoding=True)
            case (dst, landed, content):
                air = Air(boot, dst, self.agents.get((dst, boot), 0), landed, content)
                self.air.append(self.known.number(air))

    def put(self, boot: str, source: str, number: int) -> None:
        waiting = self.inboxes.get((boot, source), ())
        if not (boot in self.stopped and waiting[-1:] == (number,)):  # its door does not fill with repetitions
            self.inboxes[boot, source] = (*waiting, number)

    def take(self, queue: tuple[str, str]) -> int:
        first, *rest = self.inboxes[queue]
        if rest:
            self.inboxes[queue] = tuple(rest)
        else:
            del self.inboxes[queue]
        return first

    def deliver(self, queue: tuple[str, str], keep: bool = False) -> None:
        number = self.inboxes[queue][0] if keep else self.take(queue)
        event = self.known.items[number]
        if isinstance(event, ce.FromRouter) and isinstance(event.frame, Deaths):
            for boot in event.frame.boots:  # its link is closed, with all that came over it
                self.inboxes.pop((queue[0], boot), None)
        self.run(queue[0], number)

    def delay(self, queue: tuple[str, str]) -> None:
        self.late.append((*queue, self.take(queue)))

    def arrive_late(self, entry: tuple[str, str, int]) -> None:
        self.late.remove(entry)
        boot, source, number = entry
        if boot in self.dead:
            return
        if source == "air":
            self.run(boot, number)
        else:
            self.put(boot, source, number)

    def pack(self, boot: str, job: int) -> None:
        dst = self.parts[boot].part.posts[job][0].boot
        self.happen(boot, Pack(job, None if dst in self.dead else self.agents.get((dst, boot), 0)))

    def land(self, number: int, notices: int) -> None:
        self.air.remove(number)
        air = self.known.items[number]
        if air.dst in self.dead:
            return
        self.happen(air.dst, Land(air, max(0, notices)))
        self.posted(air, lost=False)
        if notices < 0:
            self.late.append((air.dst, "air", self.known.number(LandedIn(air.src, air.landed))))

    def lose_air(self, lost: Callable[[Air], bool]) -> None:
        """The agent that they were for is destroyed: its peers are told."""
        for number in [number for number in self.air if lost(self.known.items[number])]:
            self.air.remove(number)
            self.posted(self.known.items[number], lost=True)

    def posted(self, air: Air, *, lost: bool) -> None:
        if air.src not in self.dead:
            self.put(air.src, "wire", self.known.number(Posted(air.dst, air.landed.sequence, lost)))

    def copy(self, boot: str, job: int) -> None:
        """With what stands in the peer's memory at this moment."""
        read = self.parts[boot].part.reads[job]
        source: tuple[Any, ...] = ()
        if read.landed is None:
            peer = self.parts[read.boot].part
            source = tuple((peer.memory[d.page], peer.kv.descriptor_generation(d.page)) for d, _ in read.units)
        self.happen(boot, Copy(job, source))

    # ----------------------------------------------------------------------------------------------- router and ingress

    def living(self, role: str) -> str:
        return next((boot for boot in self.parts if boot[0] == role and boot not in self.dead), "")

    def place(self, asked: Asked) -> None:
        ctx = self.living("c")
        self.asked[asked.name] = asked._replace(ctx=ctx, gen="", bind="idle", decoding=False)
        submit = submit_of(asked.name, asked.attempt, self.scope.tokens(asked.name))
        self.put(ctx, "ingress", self.known.number(ce.FromIngress(submit)))

    def router(self, boot: str, frame: Any) -> None:
        asked = self.asked[frame.request]
        if asked.key != (frame.request, frame.attempt) or asked.outcome:
            return
        if isinstance(frame, Progress) and asked.bind in ("idle", "bound") and boot == asked.ctx:
            self.bind(asked)  # after `bound`: ctx says that it lost its reader
        elif isinstance(frame, NotNow) and frame.why in TEMPORARY:
            self.asked[asked.name] = asked._replace(bind="again")
        elif isinstance(frame, NotNow):  # this gen will never take this attempt
            self.again(asked)
        elif isinstance(frame, Bound):
            self.asked[asked.name] = asked._replace(bind="bound", gen=boot)

    def bind(self, asked: Asked) -> None:
        self.asked[asked.name] = asked._replace(bind="asked", gen="")
        tokens = self.scope.tokens(asked.name)
        hashes = submit_of(asked.name, asked.attempt, tokens).hashes
        bind = Bind(1, *asked.key, PeerAddress("c", asked.ctx, "h", 1), len(tokens), 8, 1, hashes, NAMESPACE)
        self.put(self.living("g"), "router", self.known.number(ce.FromRouter(bind)))

    def ingress(self, item: Any) -> None:
        asked = self.asked[item.request]
        if asked.key == (item.request, item.attempt) and not asked.outcome and isinstance(item, ce.Fail):
            self.again(asked, retryable=item.retryable)

    def again(self, asked: Asked, *, retryable: bool = True) -> None:
        self.tell_cancel(asked)
        if retryable and asked.attempt + 1 < self.scope.attempts:
            self.place(asked._replace(attempt=asked.attempt + 1))
        else:
            self.over(asked, "failed")

    def over(self, asked: Asked, outcome: str) -> None:
        self.asked[asked.name] = asked._replace(outcome=outcome, bind="idle")

    def cancel(self, name: str) -> None:
        self.tell_cancel(self.asked[name])
        self.over(self.asked[name], "cancelled")

    def tell_cancel(self, asked: Asked) -> None:
        """To ctx, and to the gen that is, or is just being, bound."""
        cancel = Cancel(*asked.key, "client")
        if asked.ctx not in self.dead:
            self.put(asked.ctx, "ingress", self.known.number(ce.FromIngress(cancel)))
        if asked.gen and asked.gen not in self.dead:
            self.put(asked.gen, "ingress", self.known.number(ce.FromIngress(cancel)))
        elif not asked.gen and asked.bind != "idle":
            self.put(self.living("g"), "router", self.known.number(ce.FromRouter(cancel)))

    # ------------------------------------------------------------------------------------------------ life, death, time

    def start(self, role: str, number: int) -> None:
        boot = f"{role}.{number}"
        self.parts[boot] = self.known.node((Ctx if role == "c" else Gen)(boot, self.scope))
        ctx, gen = self.living("c"), self.living("g")
        if ctx and gen:
            self.pair(gen, ctx)

    def pair(self, gen: str, ctx: str) -> None:
        landing, same = self.scope.landing, self.scope.gen_page == 4
        units = self.scope.units_per_grant if landing else 0
        name = "nixl" if landing else "shm"
        if landing:
            self.happen(ctx, Agent(gen, self.agents.get((gen, ctx), 0)))
        self.happen(gen, ce.PairUp(ctx, name, landing, not landing, units, 0 if same else 4))

    def stop(self, boot: str) -> None:
        self.stopped.add(boot)

    def go_on(self, boot: str, renewed: bool) -> None:
        self.stopped.discard(boot)
        if renewed:
            self.renew(boot)
        self.happen(boot, ce.Tick())
        if not renewed:
            self.renew(boot)

    def kill(self, boot: str) -> None:
        """Its pages stay mapped, its writes in the air may land; another boot takes its place at once."""
        self.dead.add(boot)
        self.stopped.discard(boot)
        gone = [queue for queue in self.inboxes if boot in (queue[:1] if self.scope.linger else queue)]
        for queue in gone:
            del self.inboxes[queue]
        if boot[0] == "g":
            self.lose_air(lambda air: air.dst == boot)
        for other in [other for other in self.parts if other not in self.dead]:
            if other[0] == "g":
                self.happen(other, Mapped(boot, tuple(self.parts[boot].part.kv._pool.generations.tolist())))
                self.happen(other, ce.PairDown(boot))
            self.put(other, "router", self.known.number(ce.FromRouter(Deaths((boot,)))))
        self.start(boot[0], int(boot[2:]) + 1)
        for asked in [asked for asked in self.asked.values() if not asked.outcome]:
            if asked.gen == boot or (boot[0] == "g" and asked.bind != "idle" and not asked.gen):
                if asked.decoding or asked.ctx in self.dead:
                    self.again(asked)
                else:
                    self.bind(asked)
            elif asked.ctx == boot and asked.bind != "bound":
                self.again(asked)

    def renew(self, boot: str) -> None:
        keys = tuple(a.key for a in self.asked.values() if not a.outcome and boot in (a.ctx, a.gen))
        if keys:
            self.happen(boot, ce.FromIngress(Renew(keys, STEP.request_lease_s)))

    def step(self) -> None:
        """Time passes: leases are renewed, cores tick, what was put off until later comes."""
        over = all(asked.outcome for asked in self.asked.values())
        self.ended = self.ended + 1 if over and not self.stopped else 0
        if self.ended > 2 * OLD:
            raise Broken(f"{self.ended} steps after the last request ended, something is still held")
        for boot in [boot for boot in self.parts if boot not in self.dead]:
            self.happen(boot, Passed())
            if boot not in self.stopped:
                self.renew(boot)
                self.happen(boot, ce.Tick())
        waiting, self.unpaired = self.unpaired, []
        for gen, ctx in waiting:
            if gen in self.stopped or ctx in self.stopped:  # it takes both to pair
                self.unpaired.append((gen, ctx))
            elif gen not in self.dead and ctx not in self.dead:
                self.pair(gen, ctx)
        for asked in [asked for asked in self.asked.values() if not asked.outcome]:
            if asked.bind == "again":
                self.bind(asked)
            elif asked.bind == "bound":
                self.reconcile(asked)

    def reconcile(self, asked: Asked) -> None:
        """The router hears from gen's whole set that it has no such request any more."""
        if asked.gen in self.stopped or asked.key in self.parts[asked.gen].part.core:
            return
        if asked.ctx not in self.dead and asked.key in self.parts[asked.ctx].part.core:
            self.bind(asked)
        else:
            self.again(asked)

    @property
    def quiet(self) -> bool:
        """All requests have ended, nothing is held for anybody, anywhere."""
        return all(asked.outcome for asked in self.asked.values()) and all(
            node.quiet for boot, node in self.parts.items() if boot not in self.dead
        )


@dataclass
class Found:
    """What a search saw. `broken`: the first law that was, with the moves that led there."""

    states: int = 0
    moves: int = 0
    ends: int = 0
    workers: int = 0  # states of single workers
    seconds: float = 0.0  # of one processor
    deepest: int = 0
    whole: bool = False  # nothing was left out
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    broken: str | None = None
    history: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.states:,} states of the world and {self.workers:,} of its workers, {self.moves:,} moves, "
            f"{self.ends:,} quiet ends, {self.seconds:.1f} s"
        )


def search(scope: Scope, max_states: int = 10_000_000) -> Found:
    """All states of `scope`; stops at the first that breaks a law."""
    found, begun, known = Found(), time.process_time(), Known(scope)
    nodes: list[Node] = known.listed
    first = World(known, nodes).state()
    seen = {first: 0}
    origin: list[tuple[int, str]] = [(-1, "")]  # how each state was reached first
    back: list[list[int]] = [[]]  # by which states, without a fault
    ends: list[int] = []
    front: deque[tuple[State, int, int]] = deque([(first, 0, 0)])
    while front and len(origin) < max_states and not found.broken:
        state, number, found.deepest = front.popleft()
        end = True
        for name, call, args, is_fault in World(known, nodes, state).moves():
            end = end and is_fault
            world = World(known, nodes, state)
            world.faults -= is_fault
            try:
                getattr(world, call)(*args)
            except Broken as error:
                found.broken, found.history = str(error), [*_history(origin, number), name]
                break
            found.moves += 1
            found.faults[name.split()[0].strip(":")] += is_fault
            after = world.state()
            at = seen.get(after)
            if at is None:
                at = seen[after] = len(origin)
                origin.append((number, name))
                back.append([])
                front.append((after, at, found.deepest + 1))
            if not is_fault:
                back[at].append(number)
        if end:
            ends.append(number)
    found.states, found.ends, found.workers = len(origin), len(ends), len(nodes)
    found.whole = not front and not found.broken
    if found.whole:
        _all_reach_an_end(found, origin, back, ends)
    found.seconds = time.process_time() - begun
    return found


def _history(origin: list[tuple[int, str]], number: int) -> list[str]:
    names = []
    while number >= 0:
        number, name = origin[number]
        names.append(name)
    return names[-2::-1]


def _all_reach_an_end(found: Found, origin: list[tuple[int, str]], back: list[list[int]], ends: list[int]) -> None:
    reached, todo = set(ends), list(ends)
    while todo:
        for before in back[todo.pop()]:
            if before not in reached:
                reached.add(before)
                todo.append(before)
    stuck = next((number for number in range(len(back)) if number not in reached), None)
    if stuck is not None:
        found.broken, found.history = "a state from which no quiet end can be reached", _history(origin, stuck)
