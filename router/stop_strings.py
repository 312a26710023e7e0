"""Stop strings over a stream of bytes: an Aho-Corasick automaton, so each byte costs one step whatever the strings.

The match is the one that *ends* first (of several that end together, the longest), which is what reading the text
character by character would find: it does not depend on where tokens begin or end. Working on bytes, a string may also
span tokens that each hold part of a character. Knows no tokens; immutable, one for a request, shared by its samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of some non-empty strings. State 0 is the start; states are only passed around, never inspected.

    Attributes:
        matched: state -> length in bytes of the longest stop string that ends there, 0 for none.
        held: state -> how many of the last bytes may still become a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not strings or "" in strings:
            raise ValueError("stop strings must be non-empty")
        self._next: list[dict[int, int]] = [{}]
        self._fail = [0]
        self.matched = [0]
        depth = [0]
        for string in strings:
            state = 0
            for byte in string.encode():
                if byte not in self._next[state]:
                    self._next[state][byte] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.matched.append(0)
                    depth.append(depth[state] + 1)
                state = self._next[state][byte]
            self.matched[state] = depth[state]
        self._link()
        self.held = [self._longest_open_prefix(state, depth) for state in range(len(depth))]

    def _link(self) -> None:
        """Breadth first: where to go on when no edge fits, and matches inherited from shorter suffixes."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for byte, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], byte)
                self.matched[child] = self.matched[child] or self.matched[self._fail[child]]
                queue.append(child)

    def _longest_open_prefix(self, state: int, depth: list[int]) -> int:
        while state and not self._next[state]:  # a whole string that no longer one begins with
            state = self._fail[state]
        return depth[state]

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        while True:
            following = self._next[state].get(byte)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fail[state]
