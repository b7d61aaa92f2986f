"""What other engines keep, as far as the traces can tell: three simpler caches under the same budget and
slots.

- whole: conversations move to memory with all their checkpoints when their slot is needed, and back; the
  least recently used one is dropped whole.
- newest: the same, but a conversation has only its newest checkpoint.
- slots: checkpoints live and die with the slot; there is nothing beside the slots.

All three use the slot or the conversation that saves most; none of them copies from one that lives on.
"""

from dataclasses import dataclass, field
from typing import Literal

from alone import Size
from regrow.policy.checkpoints import checkpoint_cuts
from replay import Turn

Name = Literal["whole", "newest", "slots"]
KEY_BYTES = 8
MINE = 0.5  # a slot whose conversation is cut back further than this holds another one


@dataclass(slots=True, eq=False)
class Conversation:
    """prefixes: of its cuts. states: position -> prefix of its checkpoints. used: when, as a count."""

    length: int = 0
    prefixes: frozenset[bytes] = frozenset()
    states: dict[int, bytes] = field(default_factory=dict)
    used: int = 0

    def usable(self, turn: Turn, *, hybrid: bool) -> int:
        """Return how many of a prompt's tokens it saves."""
        if hybrid:
            known = dict(zip(turn.plan.cuts, turn.prefixes, strict=True))
            return max((p for p, key in self.states.items() if known.get(p) == key), default=0)
        pairs = zip(turn.plan.cuts, turn.prefixes, strict=True)
        return max((p for p, key in pairs if key in self.prefixes), default=0)


class Baseline:
    """One of them with `slots` slots and `budget` bytes for what is not a slot's cells."""

    def __init__(self, name: Name, slots: int, budget: int, size: Size, checkpoints: int, every: int) -> None:
        self._name, self._budget, self._size = name, budget, size
        self._checkpoints, self._every = 1 if name == "newest" else checkpoints, every
        self._slots = [Conversation() for _ in range(slots)]
        self._parked: list[Conversation] = []
        self._serving: dict[int, Conversation] = {}
        self._clock = 0

    def begin(self, number: int, turn: Turn) -> int:
        self._clock += 1
        hybrid = bool(self._size.state)
        idle = [c for c in self._slots if all(c is not busy for busy in self._serving.values())]
        kept = [*idle, *self._parked]
        best = max(kept, key=lambda c: (c.usable(turn, hybrid=hybrid), c in idle))
        reused = best.usable(turn, hybrid=hybrid)
        if reused and (best in self._parked or reused >= MINE * best.length):
            mine = best
        else:
            mine, reused = Conversation(), 0
        if mine not in idle:
            if mine in self._parked:
                self._parked.remove(mine)
            place = self._slots.index(min(idle, key=lambda c: c.used))
            if self._name != "slots" and self._slots[place].states:
                self._parked.append(self._slots[place])
            self._slots[place] = mine
        self._read(mine, turn, reused)
        self._serving[number] = mine
        self._fit()
        return reused

    def end(self, number: int) -> None:
        self._serving.pop(number).used = self._clock

    def _read(self, mine: Conversation, turn: Turn, reused: int) -> None:
        prefix = dict(zip(turn.plan.cuts, turn.prefixes, strict=True))
        cuts = checkpoint_cuts(turn.plan, self._every, (), self._checkpoints)
        protected = {cut.position for cut in cuts if cut.protected}
        states = {p: key for p, key in mine.states.items() if p <= reused}
        states |= {cut.position: prefix[cut.position] for cut in cuts if cut.position > reused}
        excess = len(states) - self._checkpoints
        for position in sorted(states):
            if excess > 0 and position not in protected:
                del states[position]
                excess -= 1
        mine.length, mine.states, mine.used = turn.plan.length, states, self._clock
        mine.prefixes = frozenset(turn.prefixes)

    def _fit(self) -> None:
        """Drop what was used least recently until the rest fits: whole parked conversations, then the lowest
        checkpoints of the slots."""
        for parked in sorted(self._parked, key=lambda c: c.used):
            if self._bytes() > self._budget:
                self._parked.remove(parked)
        for slot in sorted(self._slots, key=lambda c: c.used):
            while slot.states and self._bytes() > self._budget:
                del slot.states[min(slot.states)]

    def _bytes(self) -> int:
        states = sum(len(c.states) for c in (*self._slots, *self._parked)) * self._size.state
        return states + sum(c.length for c in self._parked) * (self._size.token + KEY_BYTES)
