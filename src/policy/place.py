"""Which slot serves a prompt, and what it starts from (S1, S2).

Every way to serve the prompt is a `Candidate`; the one with the least estimated time wins. So far a slot
starts from what it holds itself; copies from other holders join as candidates with bytes to copy.
"""

from collections.abc import Mapping, Sequence
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

    read: float
    copy: Mapping[Source, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Serve the prompt in `slot` from its first `position` keys, which `holder` has; None where nothing does.

    copy_bytes: to be copied into the slot first; 0 in place. version: the holder's, as it was when chosen.
    """

    slot: int
    source: Source
    position: int
    holder: HolderId | None = None
    version: int = 0
    copy_bytes: int = 0

    def cost(self, length: int, rates: Rates) -> float:
        """Return the estimated seconds until a prompt of `length` tokens is read (S1)."""
        copying = self.copy_bytes / rates.copy[self.source] if self.copy_bytes else 0.0
        return copying + (length - self.position) / rates.read


def place(
    length: int, system_end: int, slots: Sequence[Holder], matches: Sequence[Match], rates: Rates
) -> Candidate | None:
    """Return how to serve a prompt of `length` tokens, or None where every slot is busy and it must wait.

    An idle slot whose conversation the prompt continues is used in place. Otherwise an empty slot is, else
    the least recently used idle one; what that shares with the prompt is reused, not read again (S2).
    """
    idle = [slot for slot in slots if not slot.busy]
    if not idle:
        return None
    match_of = {match.holder.id: match for match in matches}
    continued = [slot for slot in idle if (match := match_of.get(slot.id)) and continues(match, system_end)]
    targets = continued or [min(idle, key=lambda s: (s.length > 0, s.used if s.length else 0, s.id.key))]
    return cheapest([_in_place(slot, match_of.get(slot.id)) for slot in targets], length, rates)


def continues(match: Match, system_end: int) -> bool:
    """Say whether the prompt goes on with the holder's conversation instead of opening another one (S2).

    It does where it resumes at or past the conversation's last assistant start, or at the deepest place
    where that can be resumed at all (no checkpoint is lost), or at a cut that no other conversation shares.
    The end of a system prompt is shared by its nature, also before a second chat is known.
    """
    holder, position = match.holder, match.position
    if not position:
        return False
    return position >= min(holder.last_start, holder.deepest) or (position > system_end and not match.shared)


def cheapest(candidates: Sequence[Candidate], length: int, rates: Rates) -> Candidate:
    """Return the candidate of least cost; ties prefer what is in place, then memory, then disk, then low slot
    numbers (S1)."""

    def rank(candidate: Candidate) -> tuple[float, int, int]:
        tier = next(i for i, sources in enumerate(TIERS) if candidate.source in sources)
        return candidate.cost(length, rates), tier, candidate.slot

    return min(candidates, key=rank)


def _in_place(slot: Holder, match: Match | None) -> Candidate:
    number = int(slot.id.key)
    if match is None or not match.position:
        return Candidate(number, "none", 0, version=slot.version)
    live = slot.states is None or match.position == slot.length
    return Candidate(number, "live" if live else "checkpoint", match.position, slot.id, slot.version)
