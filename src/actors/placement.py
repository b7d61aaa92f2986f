"""Where the next request is served and from what: the directory, kept up to date, and the choice made from
it.

Holds what the engine knows of slots, parked conversations and roots (S0), which donors are lent to a running
copy, what is being read now (S6), the learned branch points (P4), and the measured rates (S1).
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from regrow.actors.disk_messages import (
    DiskChanged,
)
from regrow.actors.messages import (
    CacheChanged,
    Copied,
    MountEnded,
    Prepared,
    RequestDone,
    SessionChanged,
)
from regrow.actors.shelf import Kept
from regrow.policy.checkpoints import system_end
from regrow.policy.directory import CutHash, Directory, Holder, HolderId, Match
from regrow.policy.flight import Reading, awaited
from regrow.policy.keys import Keys, Namespace, common_prefix
from regrow.policy.learned import BranchPoints, branch_point
from regrow.policy.place import Candidate, Rates, Source, Targets, place
from regrow.policy.request import Exactness
from regrow.policy.resume import resume_point

SMOOTH = 0.2  # weight of the newest measurement of a rate


@dataclass(frozen=True, slots=True)
class Choice:
    """Serve the request as `candidate` says; take checkpoints at `wanted` (P3 and the learned cuts)."""

    candidate: Candidate
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the request in the queue. reader: the slot that is reading what it shares, up to `cut`; None
    where no slot is free."""

    reader: int | None = None
    cut: int = 0


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt that some holder has. live: the holder's own running state is at its end. shared: how many
    leading keys it has of the prompt that was asked about."""

    holder: Holder
    namespace: Namespace | None
    keys: Keys
    live: bool
    shared: int


@dataclass(slots=True)
class _Given:
    """What a slot was given to serve: the cuts that others may use, where its reading is, how many of its
    cells the mount leaves, and the donor it copies from."""

    request: str
    cuts: tuple[CutHash, ...]
    position: int
    leaves: int
    reading: bool = True
    donor: tuple[int, int] | None = None


@dataclass(slots=True)
class Placement:
    """bytes_per_token: of a copied cell. bytes_per_state: of a running state. chunk: tokens of a read one."""

    hybrid: bool
    exact: Exactness
    bytes_per_token: int
    chunk: int
    bytes_per_state: int = 0
    rates: Rates = field(default_factory=Rates)
    copied: dict[Source, Copied] = field(default_factory=dict)
    sessions: dict[int, SessionChanged] = field(default_factory=dict)
    _directory: Directory = field(init=False)
    _parked: dict[HolderId, Kept] = field(default_factory=dict)
    _given: dict[int, _Given] = field(default_factory=dict)
    _used: dict[int, int] = field(default_factory=dict)
    _stamps: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _branches: BranchPoints = field(default_factory=BranchPoints)

    def __post_init__(self) -> None:
        self._directory = Directory(hybrid=self.hybrid)

    def session_changed(self, session: SessionChanged) -> None:
        self.sessions[session.slot] = session
        given = self._given.get(session.slot)
        if given is not None and session.holder.busy:
            given.reading = session.reading
            given.position = max(given.position, session.holder.length)
        self._note(session.slot)

    def cache_changed(self, changed: CacheChanged) -> None:
        self._directory.states_changed(changed.states_added, changed.states_removed)
        for kept in changed.kept:
            self._directory.update(kept.holder)
            if kept.keys is not None:
                self._parked[kept.holder.id] = kept
        for gone in changed.gone:
            self._directory.remove(gone)
            self._parked.pop(gone, None)

    def disk_changed(self, changed: DiskChanged) -> None:
        kept = tuple(record.told for record in changed.added)
        self.cache_changed(CacheChanged(frozenset(), frozenset(), kept, changed.gone))
        if changed.rate is not None:
            self.rates = replace(self.rates, copy={**self.rates.copy, "disk": changed.rate})

    def disk_lost(self) -> None:
        """The disk actor has crashed: the next one tells anew what is there."""
        self._directory.forget_kind("disk")
        for name in [name for name in self._parked if name.kind == "disk"]:
            del self._parked[name]

    def cache_lost(self) -> None:
        """The cache has crashed: what it kept is gone."""
        self._parked.clear()
        self._directory.forget_kept()

    def mount_ended(self, ended: MountEnded) -> None:
        """The donor is free again; a copy says how fast its lane is."""
        given = self._given.get(ended.slot)
        if given is not None:
            given.donor = None
        if ended.copied and ended.ms:
            copy = dict(self.rates.copy)
            if ended.source != "disk":  # which tells itself how fast it is
                copy[ended.source] = smoothed(copy.get(ended.source), ended.copied / ended.ms * 1e3)
            self.rates = replace(self.rates, copy=copy)
            before = self.copied.get(ended.source, Copied())
            self.copied[ended.source] = Copied(before.nbytes + ended.copied, before.seconds + ended.ms / 1e3)

    def request_done(self, done: RequestDone) -> None:
        if done.read and done.read_ms:
            self.rates = replace(self.rates, read=smoothed(self.rates.read, done.read / done.read_ms * 1e3))

    def give(self, slot: int, request: str, prepared: Prepared, candidate: Candidate) -> None:
        """Note that `slot` serves `request` from now on."""
        holder = candidate.holder
        lent = holder is not None and holder.kind == "slot" and holder.key != slot
        public = prepared.public(candidate.position)
        self._given[slot] = _Given(
            request,
            tuple(cut for cut in _cuts(prepared) if cut[0] <= public),
            candidate.position,
            leaves=candidate.position if holder == HolderId("slot", slot) else 0,
            donor=(int(holder.key), candidate.position) if lent and holder is not None else None,
        )
        self._used[slot] = next(self._stamps)
        self._note(slot)

    def given(self, slot: int) -> str | None:
        """Return the request that `slot` was given."""
        given = self._given.get(slot)
        return None if given is None else given.request

    @property
    def serving(self) -> frozenset[str]:
        return frozenset(given.request for given in self._given.values())

    def take_back(self, slot: int) -> None:
        """`slot` serves nothing any more."""
        if self._given.pop(slot, None) is not None:
            self._used[slot] = next(self._stamps)
            self._note(slot)

    def lose(self, slot: int) -> None:
        """The slot has crashed: nothing is known of it."""
        self.take_back(slot)
        self.sessions.pop(slot, None)
        self._directory.remove(HolderId("slot", slot))

    def choose(self, prepared: Prepared, *, use_sources: bool, use_disk: bool = True) -> Choice | Wait:
        """Choose slot and source for a request (S0 to S2), or wait: for a slot, or for a reader (S6).

        use_sources: False where the prompt is to be read from its start whatever is known (S9). use_disk:
        False where a record has failed it before.
        """
        slots = [h for s in sorted(self.sessions) if (h := self._directory.get(HolderId("slot", s)))]
        matches = self._matches(prepared, slots) if use_sources else ()
        if not use_disk:
            matches = [match for match in matches if match.holder.id.kind != "disk"]
        cuts = _cuts(prepared)
        if use_sources:
            have = max((match.position for match in matches), default=0)
            readers = [Reading(s, g.cuts, g.position) for s, g in self._given.items() if g.reading]
            flight = awaited(cuts, have, readers)
            if flight is not None:
                return Wait(flight[0].slot, flight[1])
        lent = {slot: position for g in self._given.values() if g.donor for slot, position in [g.donor]}
        placed = place(
            len(prepared.keys),
            system_end(prepared.plan),
            Targets(slots, lent),
            matches,
            self.rates,
            self.bytes_per_token,
            self.bytes_per_state,
        )
        if placed is None:
            return Wait()
        return Choice(placed, self._wanted(prepared, cuts, matches, placed.position))

    @property
    def holds_anything(self) -> bool:
        return bool(self._parked) or any(len(session.keys) for session in self.sessions.values())

    def may_hold(self, prefixes: Collection[bytes]) -> bool:
        """Say whether a slot or anything that is kept holds one of these prefixes, or is about to."""
        sessions = (cut for session in self.sessions.values() for cut in session.holder.cuts)
        coming = (cut for given in self._given.values() for cut in given.cuts)
        return any(self._directory.holds(prefix) for prefix in prefixes) or any(
            prefix in prefixes for _, prefix in itertools.chain(sessions, coming)
        )

    def known(self, prepared: Prepared) -> list[KnownPrompt]:
        """Return the prompts that are known in this one's namespace: those of the slots, and of the parked
        conversations that share its first cuts, the nearest ones at least."""
        matched = {m.holder.id: m.known for m in self._directory.lookup(_cuts(prepared), self.exact)}
        there = [(s.holder, s.namespace, s.keys, s.live) for s in self.sessions.values()]
        parked = (self._parked[name] for name in matched if name in self._parked)
        there += [(k.holder, k.namespace, k.keys, False) for k in parked if k.keys is not None]
        return [
            KnownPrompt(holder, space, keys, live, _shared(prepared, keys, matched.get(holder.id, 0)))
            for holder, space, keys, live in there
            if space == prepared.namespace and len(keys)
        ]

    def usable(self, prepared: Prepared, known: KnownPrompt) -> int:
        """Return how many of the prompt's tokens the holder of a known prompt could give (R1)."""
        holder = known.holder
        states = (
            [p for p, key in holder.cuts if self._directory.has_state(holder, key)] if self.hybrid else None
        )
        live_end = holder.length if known.live and self.exact == "off" else None
        return resume_point(prepared.plan, known.shared, holder.pure_length, states, self.exact, live_end)

    def _note(self, slot: int) -> None:
        """Bring the directory up to date with a slot's session and with what it was given to do."""
        session, given = self.sessions.get(slot), self._given.get(slot)
        if session is None:
            return
        holder = replace(session.holder, used=self._used.get(slot, 0))
        if given is not None and not holder.busy:  # the mount is to come: no source beyond what it leaves
            cuts = tuple(cut for cut in holder.cuts if cut[0] <= given.leaves)
            holder = replace(holder, length=min(holder.length, given.leaves), cuts=cuts, busy=True)
        self._directory.update(holder)

    def _matches(self, prepared: Prepared, slots: Sequence[Holder]) -> Sequence[Match]:
        matches = self._directory.lookup(_cuts(prepared), self.exact)
        if self.exact != "off":
            return matches
        found = {match.holder.id: match for match in matches}
        for holder in slots:  # mode "off" is not bound to the plan's cuts (R1)
            session = self.sessions[int(holder.id.key)]
            if session.namespace != prepared.namespace:
                continue
            match = found.get(holder.id, Match(holder, 0, 0, shared=False))
            shared = _shared(prepared, session.keys, match.known)
            known = KnownPrompt(holder, session.namespace, session.keys, session.live, shared)
            deeper = self.usable(prepared, known)
            if deeper > match.position and not holder.busy:
                found[holder.id] = replace(match, position=deeper, known=max(deeper, match.known))
        return tuple(found.values())

    def _wanted(
        self, prepared: Prepared, cuts: Sequence[CutHash], matches: Sequence[Match], resume: int
    ) -> tuple[int, ...]:
        """The cuts to take checkpoints at: those the plan asks for, and the learned ones (P3, P4)."""
        known = max((match.known for match in matches), default=0)
        point = branch_point(known, resume, self.chunk)
        if point is not None:
            self._branches.learn(dict(cuts)[point])
        learned = {position for position, key in cuts if key in self._branches}
        return tuple(sorted(learned.union(prepared.wanted)))


def _shared(prepared: Prepared, keys: Keys, known: int) -> int:
    """Return how many leading keys are those of the prompt; the first `known` are, by their hash."""
    return known + common_prefix(prepared.keys[known:], keys[known:])


def _cuts(prepared: Prepared) -> tuple[CutHash, ...]:
    return tuple(zip(prepared.plan.cuts, prepared.hashes, strict=True))


def smoothed(old: float | None, new: float) -> float:
    """Return a measured value after a new measurement of it."""
    return new if old is None else old + SMOOTH * (new - old)
