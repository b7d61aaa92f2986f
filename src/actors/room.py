"""Making room on the shelf: what has to go for something that comes (B2).

A decision goes by what everything is worth (`weights.py`). What is decided to go changes what the rest of its
holders is worth, so that is weighed again, as if it had gone already. Nothing is evicted before all of it is
decided.
"""

import heapq
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial

from regrow.actors.shelf import KEY_BYTES, Conversation, Shelf, Span, State, Thing, Unit, root_holder
from regrow.actors.weights import ByHolder, Name, Scales, Weights
from regrow.policy.directory import HolderId
from regrow.policy.eviction import Evictable, value, yields


class Decision(Scales):
    """One decision on what goes. cut_back: keep of a conversation only what ends at or below a position."""

    def __init__(
        self,
        shelf: Shelf,
        conversations: Mapping[HolderId, Conversation],
        weights: Weights,
        cut_back: Callable[[HolderId, int], None],
    ) -> None:
        lines, costs, below = weights.by_holder
        over = ByHolder(ChainMap({}, lines), ChainMap({}, costs), ChainMap({}, below))
        super().__init__(shelf, conversations, over)
        self._cut_back = cut_back
        self._ranked = weights.ranking.ascending(shelf.now)
        self._left: dict[Thing, Set[HolderId]] = {}  # the holders of what has lost some
        self._lengths: dict[HolderId, int] = {}  # of conversations that are cut back; 0 of a root that goes
        self._changed: dict[Name, None] = {}
        self._anew: dict[Name, Evictable | None] = {}  # the worth of what was weighed again, or is decided
        self._heap: list[tuple[float, int, int, Name, Evictable]] = []  # value, last use, a number of its own
        self._count = 0
        self._freed = 0

    def victims(self, size: int, worth: Evictable | None) -> Sequence[tuple[int, Unit]]:
        """Return what goes for `size` bytes, in order, each with the bytes that are free by then: fewer
        where nothing more can go, or only what is clearly worth more than `worth`."""
        going: list[tuple[int, Unit]] = []
        candidates = self._candidates()
        while self._freed < size and (found := next(candidates, None)) is not None:
            name, candidate = found
            if self._is_lent(name):
                continue
            if not yields(candidate, worth, self._shelf.now):
                if candidate.kind == "root":
                    continue
                break
            evict = self._eviction(name)
            self._let_go(name)
            going.append((self._freed, Unit(candidate, evict)))
        return going

    def _candidates(self) -> Iterator[tuple[Name, Evictable]]:
        """Give what may go, each once until it is weighed again, what is worth least now first."""
        ranked = next(self._ranked, None)
        while True:
            self._weigh_again()
            while self._heap and self._anew[self._heap[0][3]] is not self._heap[0][4]:
                heapq.heappop(self._heap)
            while ranked is not None and ranked[1] in self._anew:
                ranked = next(self._ranked, None)
            if self._heap and (ranked is None or self._heap[0][:2] <= (ranked[0], ranked[2].used)):
                *_, name, candidate = heapq.heappop(self._heap)
            elif ranked is not None:
                _, name, candidate = ranked
            else:
                return
            self._anew[name] = None
            yield name, candidate

    def _weigh_again(self) -> None:
        now = self._shelf.now
        for name, worth in self._weigh(self._changed).items():
            self._anew[name] = worth
            if worth is not None:
                self._count += 1
                heapq.heappush(self._heap, (value(worth, now), worth.used, self._count, name, worth))
        self._changed.clear()

    def _is_lent(self, name: Name) -> bool:
        """Say whether a conversation or a root is in use, or this is the state of such a root."""
        holder = root_holder(name.prefix) if isinstance(name, State) else name
        return isinstance(holder, HolderId) and holder in self._shelf.guarded

    def _eviction(self, name: Name) -> Callable[[], None]:
        match name:
            case Span():
                return partial(self._shelf.drop_span, name)
            case State():
                return partial(self._shelf.evict_state, name.prefix)
            case HolderId("root"):
                return partial(self._shelf.evict_root, bytes.fromhex(str(name.key)))
        return partial(self._cut_back, name, self._below[name])

    def _let_go(self, name: Name) -> None:
        """Take it that this has gone."""
        match name:
            case Span():
                self._without(name, self._holders(name))
            case State():
                self._without(name, self._holders(name))
                if self._length(root := root_holder(name.prefix)):
                    self._cut(root, 0)  # a root without its state is none
            case HolderId("root"):
                self._cut(name, 0)
            case _:
                below = self._below[name]
                self._freed += KEY_BYTES * (self._length(name) - below)
                self._cut(name, below)

    def _cut(self, name: HolderId, below: int) -> None:
        for thing in self._above(name, below):
            self._without(thing, {name})
        self._lengths[name] = below
        self._changed[name] = None

    def _without(self, thing: Thing, losers: Set[HolderId]) -> None:
        """Take it that `losers` hold this no longer."""
        left = self._holders(thing) - losers
        self._left[thing] = left
        self._changed.update(dict.fromkeys([thing, *losers]))
        if not left and not thing.pins:
            self._freed += self._size(thing)

    def _holders(self, thing: Thing) -> Set[HolderId]:
        return self._left.get(thing, thing.holders)

    def _length(self, name: HolderId) -> int:
        return self._lengths[name] if name in self._lengths else super()._length(name)
