"""What everything on the shelf that may go is worth, and weighing anew only what has changed (B2).

A state is worth what doing without it would cost the holder whom it would cost most; that depends on the
other states of each holder. A conversation goes step by step: what lies above the last place but one to
resume it at, or above the last where that is of no use; all of it where there is no other.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from regrow.actors.shelf import KEY_BYTES, Conversation, Shelf, Span, State, Thing, root_holder
from regrow.policy.directory import HolderId
from regrow.policy.eviction import ROOT_USES, Evictable, losses
from regrow.policy.ranking import Ranking

Name = Thing | HolderId  # what goes by itself: a state, a span of slots only, a root, a conversation


@dataclass(frozen=True, slots=True)
class Cost:
    """Of doing without a state. lost: tokens to be read again. used: the last use of those above it in a
    holder's line: what goes on from there goes on from it too."""

    lost: float
    used: int


class ByHolder(NamedTuple):
    """lines: the states of each holder, ascending. costs: of each of them, to that holder. below: where each
    conversation is cut back to next."""

    lines: MutableMapping[HolderId, list[State]]
    costs: MutableMapping[HolderId, dict[State, Cost]]
    below: MutableMapping[HolderId, int]


class Scales:
    """Weighs what may go."""

    def __init__(
        self, shelf: Shelf, conversations: Mapping[HolderId, Conversation], by_holder: ByHolder
    ) -> None:
        self._shelf = shelf
        self._conversations = conversations
        self._lines, self._costs, self._below = by_holder

    def _holders(self, thing: Thing) -> Set[HolderId]:
        return thing.holders

    def _length(self, name: HolderId) -> int:
        """Return the keys that a conversation or a root has, 0 where it is none any more."""
        if name.kind == "root":
            return self._shelf.roots.get(bytes.fromhex(str(name.key)), 0)
        return self._conversations[name].holder.length if name in self._conversations else 0

    def _weigh(self, changed: Iterable[Name]) -> dict[Name, Evictable | None]:
        """Return what has changed with its worth now, and what else that changes; None: it may not go."""
        names = dict.fromkeys(changed)
        holders: dict[HolderId, None] = {}
        for name in names:
            if isinstance(name, HolderId):
                holders[name] = None
            else:
                holders.update(dict.fromkeys(h for h in self._holders(name) if self._matters(name, h)))
        for holder in holders:
            before = self._costs.get(holder, {})
            self._line_up(holder)
            after = self._costs[holder]
            names[holder] = None
            names.update((s, None) for s in before | after if before.get(s) != after.get(s))
        return {name: self._worth(name) for name in names}

    def _matters(self, thing: Thing, holder: HolderId) -> bool:
        """Say whether what else a holder has may be worth something else where this changes. It is not where
        this is the first of several states, or lies below what would go of a conversation."""
        if isinstance(thing, State):
            line = self._lines.get(holder, ())
            if len(line) < 2 or line[0] is not thing:
                return True
        return holder.kind == "root" or (holder.kind == "parked" and thing.stop > self._below.get(holder, 0))

    def _line_up(self, holder: HolderId) -> None:
        line = [t for t in self._above(holder, 0) if isinstance(t, State)]
        line.sort(key=lambda state: state.stop)
        costs, used = {}, 0
        for state, lost in zip(reversed(line), reversed(losses([s.stop for s in line])), strict=True):
            costs[state] = Cost(lost, used)
            used = max(used, state.used)
        self._lines[holder], self._costs[holder] = line, costs

    def _worth(self, name: Name) -> Evictable | None:
        match name:
            case Span():
                return self._worth_of_span(name)
            case State():
                return self._worth_of_state(name)
            case HolderId("root"):
                return self._worth_of_root(name)
            case HolderId("parked"):
                return self._worth_of_conversation(name)
        return None

    def _worth_of_span(self, span: Span) -> Evictable | None:
        """Nobody but slots would miss it, at their next park (K3)."""
        holders = self._holders(span)
        if span.pins or not holders or any(holder.kind != "slot" for holder in holders):
            return None
        return Evictable(self._size(span), 0, 0, kind="cells")

    def _worth_of_state(self, state: State) -> Evictable | None:
        """The last state of a parked conversation goes with the cells that are of no use without it."""
        holders = self._holders(state)
        only = next(iter(holders)) if len(holders) == 1 else None
        last = only is not None and only.kind == "parked" and self._lines[only][-1] is state
        if not holders or state.pins or last:
            return None
        costs = [self._costs[holder][state] for holder in holders]
        lost, used = max(cost.lost for cost in costs), max(cost.used for cost in costs)
        return Evictable(self._size(state), lost, max(used, state.used), kind="checkpoint")

    def _worth_of_root(self, name: HolderId) -> Evictable | None:
        prefix, position = bytes.fromhex(str(name.key)), self._length(name)
        state = self._shelf.states.get(prefix)
        if not position or (state is not None and state.pins):
            return None
        size = sum(map(self._share, self._above(name, 0)))
        return Evictable(size, position, self._shelf.roots_used[prefix], ROOT_USES, "root")

    def _worth_of_conversation(self, name: HolderId) -> Evictable | None:
        length = self._length(name)
        if not length:
            return None
        kept, states, mine = self._conversations[name], self._lines[name], self._above(name, 0)
        stops = sorted(thing.stop for thing in mine if isinstance(thing, Span))
        ends = [0, *(state.stop for state in states)] if kept.hybrid else [0, *stops]
        below = ends[-2] if ends[-1] == length else ends[-1]
        below = max((stop for stop in stops if stop <= below), default=0)
        last = states[-1] if states else kept
        here = isinstance(last, State) and any(holder.kind == "slot" for holder in self._holders(last))
        saved = 0 if here or ends[-1] < length else length - below  # what a slot holds too saves nothing
        size = sum(self._share(thing) for thing in mine if thing.stop > below) + KEY_BYTES * (length - below)
        self._below[name] = below
        return Evictable(size, saved, last.used, kind="parked")

    def _above(self, name: HolderId, position: int) -> list[Thing]:
        """Return what a holder has that ends above `position`."""
        return [t for t in self._shelf.held(name) if t.stop > position and name in self._holders(t)]

    def _size(self, thing: Thing) -> int:
        return self._shelf.ledger.size(thing.lease)

    def _share(self, thing: Thing) -> float:
        """Return the bytes of a state or span for each of its holders; 0 of what is in use."""
        return 0.0 if thing.pins else self._size(thing) / max(len(self._holders(thing)), 1)


class Weights(Scales):
    """What may go as the shelf is, by worth."""

    def __init__(self, shelf: Shelf, conversations: Mapping[HolderId, Conversation]) -> None:
        self.by_holder = ByHolder({}, {}, {})
        super().__init__(shelf, conversations, self.by_holder)
        self.ranking: Ranking[Name] = Ranking()

    def refresh(self) -> None:
        """Weigh what has changed since the last time."""
        changed = self._shelf.changed
        if not changed:
            return
        for name, worth in self._weigh(changed).items():
            self.ranking.put(name, worth)
        for name in changed:
            if isinstance(name, HolderId) and not self._shelf.held(name):
                for kept in self.by_holder:
                    kept.pop(name, None)
        changed.clear()

    def check_integrity(self) -> None:
        """Assert that weighing everything anew changes nothing."""
        self.refresh()
        shelf, anew = self._shelf, Weights(self._shelf, self._conversations)
        holders = {holder: None for thing in shelf.things for holder in thing.holders}
        roots = (root_holder(prefix) for prefix in shelf.roots)
        shelf.changed = dict.fromkeys([*shelf.things, *holders, *roots, *self._conversations])
        anew.refresh()
        assert self.by_holder == anew.by_holder
        assert self.ranking.entries() == anew.ranking.entries()
