"""Which gens should prefill a request themselves, found without asking each of a thousand.

The rule is local_prefill.py's, or the operator's threshold. Of few gens all are asked; of many only those that could be
chosen among all that the rule allows: the first in order of what is to be prefilled there, what decodes there and their
last turn, and of those who hold some of the prompt the first few at each length (shortlist.py). A gen for which a
hand-off is always cheaper stands in no order.

Decides nothing. Of gens whose speeds differ it may miss one that the rule would allow; then a ctx prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.router.block_index import Level
from tailrace.router.local_prefill import LocalView, cheaper_here, ever_cheaper
from tailrace.router.records import Record, RouterState
from tailrace.router.shortlist import MANY, Key, Shortlist
from tailrace.router.worker import Usable, Worker


class Alone:
    """See the module."""

    def __init__(self, state: RouterState) -> None:
        self.state = state
        self.shortlist = Shortlist(state.blocks, self._key)
        state.shortlists.append(self.shortlist)

    @property
    def _never(self) -> bool:
        settings = self.state.settings
        return settings.local_prefill == "never" or settings.local_prefill_max_tokens == 0

    def better(
        self, record: Record, gens: Usable, levels: Sequence[Level], held_tokens: Callable[[Record, Worker], int]
    ) -> list[Worker]:
        """Workers of duty gen that should prefill this request themselves: by the operator's threshold on the tokens
        that they lack, or where that costs them less than a hand-off.

        Args:
            levels: who has how much of its prompt.
            held_tokens: of it that a worker holds.
        """
        if self._never or not record.needs_gen:
            return []
        asked = gens if len(gens) <= MANY else self._few(record, gens, levels)
        tokens = record.place.num_tokens
        most = self.state.settings.local_prefill_max_tokens
        better = []
        for gen in asked:
            if gen.prefills:
                continue
            held = held_tokens(record, gen)
            if tokens - held <= most if most is not None else cheaper_here(self.view(gen), tokens - held, held):
                better.append(gen)
        return better

    def _few(self, record: Record, gens: Usable, levels: Sequence[Level]) -> Sequence[Worker]:
        state, place, found = self.state, record.place, {}

        def usable(boot: str) -> bool:
            gen = state.workers.get(boot)
            if gen is None or boot not in gens.boots or boot in place.exclude:
                return False
            found[boot] = gen
            return state.free_pages(gen) >= gen.pages_for(place.num_tokens, place.samples)

        return [found[boot] for boot in self.shortlist.boots(levels, usable)]

    def view(self, gen: Worker) -> LocalView:
        """What decides whether a gen prefills itself."""
        state, beat = self.state, gen.heartbeat
        return LocalView(
            state.workers.measured(gen), beat.costs if beat else (), gen.bytes_per_token,
            state.backlog_s(gen), state.active(gen), gen.register.max_num_tokens,
        )  # fmt: skip

    def _key(self, boot: str) -> Key | None:
        gen = None if self._never else self.state.workers.get(boot)
        if gen is None or not gen.decodes or gen.prefills:
            return None
        if self.state.settings.local_prefill_max_tokens is None and not ever_cheaper(self.view(gen)):
            return None
        return (self.state.backlog_s(gen), self.state.active(gen), gen.last_chosen, boot)
