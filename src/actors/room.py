"""Making room on the shelf: what has to go for something that comes (B2).

A decision looks at everything that is kept once. What is decided to go changes what the rest of its holders
is worth, so that is weighed again, as if it had gone already. Nothing is evicted before all of it is decided.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from regrow.actors.shelf import KEY_BYTES, Conversation, Shelf, Span, State, Thing, Unit, root_holder
from regrow.policy.directory import HolderId
from regrow.policy.eviction import ROOT_USES, Evictable, losses, value, yields

Name = Thing | HolderId  # what goes by itself: a state, a span of slots only, a root, a conversation


class Decision:
    """One decision about what goes. cut_back: keep of a conversation only what ends at or below a position.

    A conversation goes step by step: what lies above the last place but one to resume it at, or above the
    last where that is of no use; all of it where there is no other. What a slot holds too saves nothing.
    """

    def __init__(
        self,
        shelf: Shelf,
        conversations: Mapping[HolderId, Conversation],
        cut_back: Callable[[HolderId, int], None],
    ) -> None:
        self._shelf = shelf
        self._conversations = conversations
        self._cut_back = cut_back
        self._lent = {prefix for prefix in shelf.roots if root_holder(prefix) in shelf.guarded}
        self._left: dict[Thing, Set[HolderId]] = {}  # the holders of what has lost some
        self._lengths = {name: kept.holder.length for name, kept in conversations.items()}
        self._below: dict[HolderId, int] = {}  # where a conversation is cut back to next
        self._lines = shelf.lines()
        self._losses: dict[State, tuple[float, int]] = {}  # tokens to be read again without it; last use
        self._heap: list[tuple[float, int, Name, Unit]] = []
        self._newest: dict[Name, int] = {}
        self._count = 0
        self._freed = 0

    def victims(self, size: int, worth: Evictable | None) -> Sequence[tuple[int, Unit]]:
        """Return what goes for `size` bytes, in order, each with the bytes that are free by then: fewer
        where nothing more can go, or only what is clearly worth more than `worth`."""
        self._weigh_everything()
        going: list[tuple[int, Unit]] = []
        while self._freed < size and self._heap:
            _, count, name, unit = heapq.heappop(self._heap)
            if self._newest.get(name) != count:
                continue
            if not yields(unit.worth, worth, self._shelf.now):
                if unit.worth.kind == "root":
                    continue
                break
            del self._newest[name]
            self._let_go(name)
            going.append((self._freed, unit))
        return going

    def _weigh_everything(self) -> None:
        shelf = self._shelf
        for holder in self._lines:
            for thing in shelf.held(holder) if holder.kind == "slot" else ():
                if isinstance(thing, Span):
                    self._weigh_span(thing)
        for line in self._lines.values():
            self._weigh_line(line)
        for state in shelf.states.values():
            self._weigh_state(state)
        for prefix, position in shelf.roots.items():
            root = root_holder(prefix)
            if prefix not in self._lent and not (prefix in shelf.states and shelf.states[prefix].pins):
                size = sum(map(self._share, shelf.held(root)))
                worth = Evictable(size, position, shelf.roots_used[prefix], ROOT_USES, "root")
                self._push(root, worth, partial(shelf.evict_root, prefix))
        for name in self._lengths:
            self._weigh_conversation(name)

    def _weigh_span(self, span: Span) -> None:
        """Nobody but slots would miss it, at their next park (K3)."""
        if not span.pins and all(holder.kind == "slot" for holder in self._holders(span)):
            worth = Evictable(self._size(span), 0, 0, kind="cells")
            self._push(span, worth, partial(self._shelf.drop_span, span))

    def _weigh_line(self, line: Sequence[State]) -> None:
        """Note what the states of one holder, ascending, are worth to it; others may have more of them."""
        used = 0
        costs = losses([state.stop for state in line])
        for state, loss in zip(reversed(line), reversed(costs), strict=True):
            used = max(used, state.used)  # what goes on from above it goes on from it too
            before = self._losses.get(state, (0.0, 0))
            self._losses[state] = max(loss, before[0]), max(used, before[1])

    def _weigh_state(self, state: State) -> None:
        """The last state of a parked conversation goes with the cells that are of no use without it."""
        left = self._holders(state)
        name = next(iter(left)) if len(left) == 1 else None
        last = name is not None and name.kind == "parked" and self._line(name)[-1] is state
        if not left or state.pins or last or state.prefix in self._lent:
            self._newest.pop(state, None)
            return
        worth = Evictable(self._size(state), *self._losses[state], kind="checkpoint")
        self._push(state, worth, partial(self._shelf.evict_state, state.prefix))

    def _weigh_conversation(self, name: HolderId) -> None:
        if name in self._shelf.guarded or name not in self._lengths:
            return
        kept, length, states = self._conversations[name], self._lengths[name], self._line(name)
        mine = self._above(name, 0)
        stops = sorted(thing.stop for thing in mine if isinstance(thing, Span))
        ends = [0, *(state.stop for state in states)] if kept.hybrid else [0, *stops]
        below = ends[-2] if ends[-1] == length else ends[-1]
        below = max((stop for stop in stops if stop <= below), default=0)
        last = states[-1] if states else kept
        here = isinstance(last, State) and any(holder.kind == "slot" for holder in self._holders(last))
        saved = 0 if here or ends[-1] < length else length - below
        size = sum(self._share(thing) for thing in mine if thing.stop > below) + KEY_BYTES * (length - below)
        worth = Evictable(size, saved, last.used, kind="parked")
        self._below[name] = below
        self._push(name, worth, partial(self._cut_back, name, below))

    def _push(self, name: Name, worth: Evictable, evict: Callable[[], None]) -> None:
        self._count += 1
        self._newest[name] = self._count
        entry = value(worth, self._shelf.now), self._count, name, Unit(worth, evict)
        heapq.heappush(self._heap, entry)

    def _let_go(self, name: Name) -> None:
        """Take it that this has gone, and weigh anew what its holders have beside it."""
        match name:
            case Span():
                self._without(name, self._holders(name))
            case State():
                self._drop_state(name)
            case HolderId("root"):
                for thing in self._shelf.held(name):
                    self._without(thing, {name})
            case _:
                self._cut(name)

    def _drop_state(self, state: State) -> None:
        losers = set(self._holders(state))
        self._without(state, losers)
        root = root_holder(state.prefix)
        if self._newest.pop(root, None) is not None:  # a root without its state is none
            self._let_go(root)
        for loser in losers:
            self._weigh_again(loser)

    def _cut(self, name: HolderId) -> None:
        below = self._below[name]
        for thing in self._above(name, below):
            self._without(thing, {name})
        self._freed += KEY_BYTES * (self._lengths[name] - below)
        if below:
            self._lengths[name] = below
            self._weigh_again(name)
        else:
            del self._lengths[name]

    def _weigh_again(self, holder: HolderId) -> None:
        line = self._line(holder)
        for state in line:
            if len(self._holders(state)) == 1:
                del self._losses[state]
        self._weigh_line(line)
        for state in line:
            self._weigh_state(state)
        if holder.kind == "parked":
            self._weigh_conversation(holder)

    def _without(self, thing: Thing, losers: Set[HolderId]) -> None:
        """Take it that `losers` hold this no longer."""
        before = self._holders(thing)
        left = before - losers
        if len(left) == len(before):
            return
        self._left[thing] = left
        if not left and not thing.pins:
            self._freed += self._size(thing)
            self._newest.pop(thing, None)
        elif isinstance(thing, State):
            self._weigh_state(thing)
        else:
            self._weigh_span(thing)

    def _above(self, name: HolderId, position: int) -> list[Thing]:
        """Return what a holder has that ends above `position` and is not decided to go."""
        return [t for t in self._shelf.held(name) if t.stop > position and name in self._holders(t)]

    def _line(self, holder: HolderId) -> list[State]:
        """Return the states that a holder has left, ascending."""
        line = self._lines.get(holder, [])
        if not self._left:
            return line
        self._lines[holder] = [s for s in line if holder in self._holders(s)]
        return self._lines[holder]

    def _holders(self, thing: Thing) -> Set[HolderId]:
        return self._left.get(thing, thing.holders)

    def _size(self, thing: Thing) -> int:
        return self._shelf.ledger.size(thing.lease)

    def _share(self, thing: Thing) -> float:
        """Return the bytes of a state or span for each of its holders; 0 of what is in use."""
        return 0.0 if thing.pins else self._size(thing) / max(len(self._holders(thing)), 1)
