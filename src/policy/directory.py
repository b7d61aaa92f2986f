"""The directory: who holds which prefix, found by its hash at the cuts of a prompt (S0).

A look-up costs one probe a cut of the prompt, whatever is kept. What it finds is ranked by usable tokens,
never by the longest common prefix. Slots, roots, parked conversations and disk records are all holders.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

from regrow.policy.request import Exactness

HolderKind = Literal["slot", "root", "parked", "disk"]
CutHash = tuple[int, bytes]
COPIES: frozenset[HolderKind] = frozenset({"root", "disk"})  # they stand for no conversation of their own
NEWEST = 8  # of many holders of one prefix, beside the slots, this many of a kind are looked at


class HolderId(NamedTuple):
    kind: HolderKind
    key: int | str


@dataclass(frozen=True, slots=True)
class Holder:
    """What is known of one holder.

    length: keys it holds. cuts: (position, prefix hash with namespace) of its plan, ascending, up to
    `length`. pure_length: keys below it were read, never decoded (R5). last_start: its last assistant start.
    used: a stamp, later is larger. busy: a request is using it. version: which state of the holder this is.
    states: the prefixes whose running state it has itself, beside those that the cache has in memory.
    """

    id: HolderId
    length: int = 0
    cuts: tuple[CutHash, ...] = ()
    pure_length: int = 0
    last_start: int = 0
    used: int = 0
    busy: bool = False
    version: int = 0
    states: frozenset[bytes] = frozenset()

    def upto(self, stop: int) -> "Holder":
        """Return this holder with its first `stop` keys only."""
        return replace(
            self,
            length=stop,
            cuts=tuple(cut for cut in self.cuts if cut[0] <= stop),
            pure_length=min(self.pure_length, stop),
            last_start=min(self.last_start, stop),
        )


@dataclass(frozen=True, slots=True)
class Match:
    """A holder that shares a prefix with the prompt.

    position: its deepest usable cut, or 0. known: its deepest shared cut, usable or not. shared: another
    conversation is known that holds the same keys up to `position`; a root is not a conversation, and a
    record on disk is the copy of one. deepest: the deepest cut at which the holder can be resumed at all.
    """

    holder: Holder
    position: int
    known: int
    shared: bool
    deepest: int = 0


class Directory:
    """An index from prefix hashes to holders, each of which is told and forgotten as a whole.

    hybrid: the model has running state, so only prefixes with a kept state can be resumed.
    """

    def __init__(self, *, hybrid: bool) -> None:
        self._hybrid = hybrid
        self._states: set[bytes] = set()
        self._holders: dict[HolderId, Holder] = {}
        self._index: dict[bytes, dict[HolderKind, dict[HolderId, None]]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def get(self, holder: HolderId) -> Holder | None:
        return self._holders.get(holder)

    def holds(self, prefix: bytes) -> bool:
        """Say whether anybody holds this prefix, usable or not."""
        return prefix in self._index

    def update(self, holder: Holder) -> None:
        """Replace everything that was known of this holder. A slot is told of after every chunk that it
        reads, so what it holds as before stays as it is; any other holder is the newest at its cuts then."""
        known = self._holders.get(holder.id)
        same = 0
        if known is not None:
            same = _common(known.cuts, holder.cuts) if holder.id.kind == "slot" else 0
            self._unindex(known, same)
        self._holders[holder.id] = holder
        for _, key in holder.cuts[same:]:
            self._index.setdefault(key, {}).setdefault(holder.id.kind, {})[holder.id] = None

    def remove(self, holder: HolderId) -> None:
        """Forget a holder; one that is not known is no error."""
        known = self._holders.pop(holder, None)
        if known is not None:
            self._unindex(known)

    def _unindex(self, known: Holder, after: int = 0) -> None:
        """Take a holder out of the index at all its cuts but the first `after`."""
        holder = known.id
        for _, key in known.cuts[after:]:
            kinds = self._index[key]
            del kinds[holder.kind][holder]
            if not kinds[holder.kind]:
                del kinds[holder.kind]
            if not kinds:
                del self._index[key]

    def forget_kept(self) -> None:
        """Forget every state, and every holder but the slots."""
        self._states.clear()
        for holder in [h for h in self._holders if h.kind != "slot"]:
            self.remove(holder)

    def forget_kind(self, kind: HolderKind) -> None:
        """Forget every holder of a kind."""
        for holder in [h for h in self._holders if h.kind == kind]:
            self.remove(holder)

    def states_changed(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note for which prefixes the cache has a running state now."""
        self._states.update(added)
        self._states.difference_update(removed)

    def has_state(self, holder: Holder, prefix: bytes) -> bool:
        """Say whether a prefix whose cells `holder` has can be resumed (R4)."""
        return not self._hybrid or prefix in self._states or prefix in holder.states

    def deepest(self, holder: Holder, exact: Exactness) -> int:
        """Return the deepest cut at which `holder` can be resumed at all, or 0."""
        usable = (p for p, key in reversed(holder.cuts) if self._usable(holder, p, key, exact))
        return next(usable, 0)

    def _usable(self, holder: Holder, position: int, key: bytes, exact: Exactness) -> bool:
        """Say whether a prompt that shares the cut `position` can go on there (R1, R5)."""
        return (exact == "off" or position <= holder.pure_length) and self.has_state(holder, key)

    def lookup(self, cuts: Sequence[CutHash], exact: Exactness) -> tuple[Match, ...]:
        """Return who shares a prefix with the prompt whose ascending `cuts` these are, the most usable first.

        Every slot is found; of the other kinds the newest `NEWEST` at each cut.
        """
        found: dict[HolderId, Match] = {}
        settled: dict[HolderKind, int] = {}  # how many of a kind hold the cut above, if each is usable there
        for position, key in reversed(cuts):
            kinds = self._index.get(key)
            if kinds is None:
                continue
            for kind, ids in kinds.items():
                if settled.get(kind) == len(ids):
                    continue
                here = list(ids if kind == "slot" else islice(reversed(ids), NEWEST))
                for holder_id in here:
                    holder = self._holders[holder_id]
                    match = found.get(holder_id)
                    if match is None:
                        deepest = self.deepest(holder, exact) if kind == "slot" else 0
                        match = Match(holder, 0, position, shared=False, deepest=deepest)
                    if not match.position and self._usable(holder, position, key, exact):
                        conversations = sum(len(ids) for other, ids in kinds.items() if other not in COPIES)
                        shared = conversations > (kind not in COPIES)
                        match = replace(match, position=position, shared=shared)
                    found[holder_id] = match
                settled[kind] = len(ids) if all(found[one].position for one in here) else 0
        return tuple(sorted(found.values(), key=lambda match: (-match.position, -match.known)))


def _common(a: Sequence[CutHash], b: Sequence[CutHash]) -> int:
    """Return how many leading cuts are those of both: prefix hashes agree up to where keys part, and never
    beyond it."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])
