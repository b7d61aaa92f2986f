"""Which slot serves a prompt, and what it starts from (S1, S2).

Every way to serve the prompt is a `Candidate`; the one with the least estimated time wins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from regrow.policy.directory import Holder, HolderId, Match

Source = Literal["live", "checkpoint", "root", "slot", "parked", "disk", "none"]
TIERS: tuple[frozenset[Source], ...] = (
    frozenset({"live", "checkpoint", "none"}),  # already in place
    frozenset({"root", "slot", "parked"}),  # memory
    frozenset({"disk"}),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured while running: tokens read a second, bytes a second on the lane of each source."""

    read: float = 500.0
    copy: Mapping[Source, float] = field(
        default_factory=lambda: {"slot": 2e9, "root": 2e9, "parked": 2e9, "disk": 5e8}
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """Serve the prompt in `slot` from its first `position` keys, which `holder` has; None where nothing does.

    copy_bytes: to be copied into the slot first; 0 in place.
    """

    slot: int
    source: Source
    position: int
    holder: HolderId | None = None
    copy_bytes: int = 0

    def cost(self, length: int, rates: Rates) -> float:
        """Return the estimated seconds until a prompt of `length` tokens is read (S1)."""
        copying = self.copy_bytes / rates.copy[self.source] if self.copy_bytes else 0.0
        if self.source == "disk":  # into memory first, and from there as what is parked
            copying += self.copy_bytes / rates.copy["parked"]
        return copying + (length - self.position) / rates.read


@dataclass(frozen=True, slots=True)
class Targets:
    """Which slots may serve the prompt: all of them, and those lent to a running copy.

    lent: slot -> cells below this may not be written until the copy has ended.
    """

    slots: Sequence[Holder]
    lent: Mapping[int, int] = field(default_factory=dict)

    def free(self, slot: Holder, position: int) -> bool:
        """Say whether `slot` is idle and may be written from `position` on."""
        return not slot.busy and position >= self.lent.get(int(slot.id.key), 0)


def place(
    length: int,
    system_end: int,
    targets: Targets,
    matches: Sequence[Match],
    rates: Rates,
    bytes_per_token: int = 0,
    bytes_per_state: int = 0,
) -> Candidate | None:
    """Return how to serve a prompt of `length` tokens, or None where every slot is taken and it must wait.

    An idle slot whose conversation the prompt continues is used in place, unless another source saves more
    than its copy takes. Else it forks: into an empty slot, else the least recently used idle one, from
    whichever source costs least to copy or to do without (S1, S2). bytes_per_token: of a copied cell.
    bytes_per_state: of a running state, of which those of a record are read with its cells.
    """
    candidates = [
        _in_place(match)
        for match in matches
        if match.holder.id.kind == "slot"
        and targets.free(match.holder, match.position)
        and continues(match, system_end)
    ]
    free = [slot for slot in targets.slots if targets.free(slot, 0)]
    if free:
        now = max(slot.used for slot in targets.slots)
        target = min(free, key=lambda s: (s.length**2 / (1 + now - s.used), s.id.key))
        candidates += _forks(target, matches, bytes_per_token, bytes_per_state)
    return cheapest(candidates, length, rates) if candidates else None


def continues(match: Match, system_end: int) -> bool:
    """Say whether the prompt goes on with the holder's conversation instead of opening another one (S2).

    It does where it resumes at or past the conversation's last assistant start, or at the deepest place
    where that can be resumed at all (no checkpoint is lost), or at a cut that no other conversation shares.
    The end of a system prompt is shared by its nature, also before a second chat is known.
    """
    position = match.position
    if not position:
        return False
    return position >= min(match.holder.last_start, match.deepest) or (
        position > system_end and not match.shared
    )


def cheapest(candidates: Sequence[Candidate], length: int, rates: Rates) -> Candidate:
    """Return the candidate of least cost; ties prefer what is in place, then memory, then disk, then low slot
    numbers (S1)."""

    def rank(candidate: Candidate) -> tuple[float, int, int]:
        tier = next(i for i, sources in enumerate(TIERS) if candidate.source in sources)
        return candidate.cost(length, rates), tier, candidate.slot

    return min(candidates, key=rank)


def _in_place(match: Match) -> Candidate:
    slot = match.holder
    source: Source = "live" if match.position == slot.length else "checkpoint"
    return Candidate(int(slot.id.key), source, match.position, slot.id)


def _forks(
    target: Holder, matches: Sequence[Match], bytes_per_token: int, bytes_per_state: int
) -> Iterator[Candidate]:
    """Every way to open the prompt in `target`: from nothing, from what it shares itself, by a copy."""
    number = int(target.id.key)
    yield Candidate(number, "none", 0)
    for match in matches:
        if not match.position:
            continue
        if match.holder.id == target.id:
            yield _in_place(match)
        else:
            holder, position = match.holder, match.position
            states = 0
            if holder.states:
                states = sum(at <= position and key in holder.states for at, key in holder.cuts)
            size = position * bytes_per_token + states * bytes_per_state
            yield Candidate(number, holder.id.kind, position, holder.id, size)
