"""Any mix of hand-offs, local requests, cancels and pages lent elsewhere: pages are conserved, the oldest progresses,
and every request that ends does so with the tokens of an undisturbed run."""

from gen_fakes import Gen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loop_fakes import expected_tokens, handoff_of, prompt_of

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.loop_events import Admitted


class GenMachine(RuleBasedStateMachine):
    ahead = False  # whether passes are launched before the last one's tokens are known

    @initialize(
        num_pages=st.integers(6, 20),
        batch=st.integers(1, 5),
        budget=st.sampled_from([4, 8, 32]),
        window=st.sampled_from([None, None, 6]),
    )
    def start(self, num_pages, batch, budget, window):
        self.gen = Gen(num_pages=num_pages, batch=batch, budget=budget, admissions=2, window=window, ahead=self.ahead)
        self.lent: list[int] = []
        self.names = 0
        self.tails: set = set()
        self.locals: dict = {}
        self.cancelled: set = set()

    def name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def open_keys(self) -> list:
        known = [*self.gen.handoffs, *self.locals]
        return [k for k in known if k not in self.gen.node.ends and k not in self.gen.node.fails]

    @rule(
        length=st.integers(1, 14),
        max_tokens=st.integers(2, 20),
        samples=st.integers(1, 3),
        whole=st.booleans(),
        shared=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def hand_over(self, length, max_tokens, samples, whole, shared, priority):
        gen, name = self.gen, self.name()
        prompt = prompt_of(length, 0 if shared else self.names)
        tail = None if whole else max(1, length - 1)
        params = {"samples": samples, "max_tokens": max_tokens, "priority": priority}
        handoff = handoff_of(name, prompt, tail=tail, window=gen.window, **params)
        pages = gen.read(handoff, prompt)
        if pages is None:
            return
        key = (name, 0)
        gen.handoffs[key], gen.prompts[key] = handoff, prompt
        if tail is not None and tail < length:
            self.tails.add(key)
        gen.node.events.append(Admitted(handoff, pages, 0, 0.0))

    @rule(length=st.integers(1, 40), max_tokens=st.integers(0, 20), samples=st.integers(1, 3), shared=st.booleans())
    def come_locally(self, length, max_tokens, samples, shared):
        prompt = prompt_of(length, 0 if shared else self.names)
        key = self.gen.local(self.name(), prompt, max_tokens=max_tokens, samples=samples)
        self.locals[key] = (prompt, max_tokens, samples)

    @precondition(lambda self: self.open_keys())
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(self.open_keys()))
        self.gen.cancel(key)
        self.cancelled.add(key)
        self.gen.loop.run_pass()
        assert key not in self.open_keys()

    @rule(count=st.integers(1, 8))
    def run(self, count):
        for _ in range(count):
            self.gen.loop.run_pass()

    @rule(count=st.integers(1, 5))
    def lend(self, count):
        self.lent += self.gen.kv.allocate(count) or []

    @rule()
    def take_back(self):
        self.gen.kv.release(self.lent)
        self.lent = []

    @invariant()
    def pages_are_conserved(self):
        gen = self.gen
        gen.kv.check()
        held = {p for r in gen.loop._requests.values() for s in r.sequences for p in s.pages}
        queued = {p for e in gen.node.events if isinstance(e, Admitted) for p in e.pages}
        assert gen.kv.counts().used == len((held | queued | set(self.lent) | gen.given_up()) - {SCRATCH_PAGE})

    def teardown(self):
        if not hasattr(self, "gen"):
            return
        gen = self.gen
        gen.kv.release(self.lent)
        self.lent = []
        while self.open_keys():
            self.oldest_progresses()
        gen.drain()
        gen.assert_quiet()
        for key in gen.handoffs:
            self.check_end(key, range(gen.handoffs[key].samples))
        for key, (prompt, max_tokens, samples) in self.locals.items():
            if key in gen.node.ends and key not in self.cancelled and max_tokens:
                for sample in range(samples):
                    gen.assert_local_equals_undisturbed(key, prompt, sample, max_tokens=max_tokens)

    def oldest_progresses(self):
        """The oldest request advances, or ends, within as many passes as its prompt and the others' chunks can take."""
        gen = self.gen
        gen.loop.run_pass()
        open_keys = sorted(gen.loop._requests.values(), key=lambda r: r.order)
        if not open_keys:
            return
        oldest = open_keys[0]
        before = (len(gen.node.passes), sum(len(p) for p in gen.node.passes))
        for _ in range(400):
            gen.loop.run_pass()
            gen.clock.now += 0.05
            if oldest.key not in gen.loop._requests:
                return
            sent = [d for p in gen.node.passes[before[0] :] for d in p if (d.request, d.attempt) == oldest.key]
            if sent:
                return
        raise AssertionError(f"{oldest.key} does not progress")

    def check_end(self, key, samples):
        gen = self.gen
        if key in gen.node.fails:
            code, _, retryable = gen.node.fails[key]
            assert code == "out_of_pages" and (not retryable or key in self.tails)
        elif key not in self.cancelled:
            for sample in samples:
                gen.assert_equals_undisturbed(key, sample)
        else:  # what was sent before the cancel was right
            for sample in samples:
                params = SamplingParams(max_tokens=gen.handoffs[key].params.max_tokens, temperature=0.0)
                tokens, _ = expected_tokens(gen.prompts[key], params, sample=sample, window=gen.window)
                sent = gen.node.output(key, sample)
                assert sent == tokens[1 : 1 + len(sent)]


class AheadMachine(GenMachine):
    ahead = True


AheadMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestTheSameWithPassesLaunchedAhead = AheadMachine.TestCase
GenMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestPagesAreConservedWhateverHappens = GenMachine.TestCase
