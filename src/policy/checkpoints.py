"""Which cuts of a plan get a checkpoint (P3): the places where a later prompt is likely to rejoin this one.

The cuts themselves depend on the tokens alone (P1); which of them get a checkpoint may depend on messages.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from regrow.policy.plan import ASSISTANT, ReadPlan

SYSTEM_ROLES = frozenset({"system", "developer"})
Reason = Literal["turn", "pin", "system", "user turn", "previous turn", "learned", "interval", "fork"]


@dataclass(frozen=True, slots=True)
class CheckpointCut:
    """A cut that gets a checkpoint, and the first reason for it. protected: not given up for newer ones."""

    position: int
    reason: Reason
    protected: bool


def checkpoint_cuts(
    plan: ReadPlan, every: int, learned: Collection[int], limit: int, pin: int = 0
) -> tuple[CheckpointCut, ...]:
    """Return the cuts that get a checkpoint, ascending (P3, P5).

    every: one at the cut at or below each multiple of so many tokens; 0 = none of these. learned: cuts where
    other prompts left this one. limit: how many the session keeps; 0 = none. No more than that are protected;
    the last assistant start comes first, so 1 keeps the newest only.
    """
    if limit == 0:
        return ()
    starts = assistant_starts(plan)
    by_value: tuple[tuple[int, Reason], ...] = (
        (last_start(plan), "turn"),
        (plan.last_cut_at_or_below(pin), "pin"),
        (system_end(plan), "system"),
        (_user_turn(plan, starts), "user turn"),
        (starts[-2] if len(starts) > 1 else 0, "previous turn"),
    )
    wanted: dict[int, Reason] = {}
    for position, reason in by_value:
        if position:
            wanted.setdefault(position, reason)
    protected = frozenset(list(wanted)[:limit])
    for position in learned:
        if plan.is_cut(position):
            wanted.setdefault(position, "learned")
    for mark in range(every, plan.length, every) if every else ():
        if position := plan.last_cut_at_or_below(mark):
            wanted.setdefault(position, "interval")
    return tuple(CheckpointCut(p, reason, p in protected) for p, reason in sorted(wanted.items()))


def system_end(plan: ReadPlan) -> int:
    """Return where the leading system and developer messages end (the root cut, T1), or 0."""
    talk = next((s.position for s in plan.starts if s.role not in SYSTEM_ROLES), plan.length)
    return max((e.position for e in plan.ends if e.role in SYSTEM_ROLES and e.position <= talk), default=0)


def message_end(plan: ReadPlan, message: int, messages: int) -> int:
    """Return where message number `message` of the `messages` that were rendered ends, or 0 where marks do
    not tell. A template may put a system message of its own before them, and opens the answer after them."""
    own = len(plan.starts) - messages - 1
    tells = own in (0, 1) and 0 <= message < messages
    return plan.starts[message + own + 1].position if tells else 0


def last_start(plan: ReadPlan) -> int:
    """Return the last assistant start, or the last cut of a prompt without one (a raw text): the nearest
    place to where the answer begins."""
    starts = assistant_starts(plan)
    return starts[-1] if starts else plan.last_cut_at_or_below(plan.length)


def assistant_starts(plan: ReadPlan) -> tuple[int, ...]:
    """Return the message ends after which the assistant speaks, ascending: not those between the results of
    two tools, or between the system prompt and the user.

    Where no mark opens the assistant's messages, it speaks wherever text follows that no mark opens.
    """
    marked = any(start.role == ASSISTANT for start in plan.starts)
    last_before = {bisect_left(plan.starts, e.position, key=lambda s: s.position): e for e in plan.ends}
    found = []
    for index, end in last_before.items():
        following = plan.starts[index] if index < len(plan.starts) else None
        if following is None or (
            following.role == ASSISTANT if marked else following.position > end.position
        ):
            found.append(end.position)
    return tuple(found)


def _user_turn(plan: ReadPlan, starts: Sequence[int]) -> int:
    """Return the first assistant start after the last user message (tool results are not user messages)."""
    user = max((end.position for end in plan.ends if end.role == "user"), default=plan.length)
    return next((start for start in starts if start >= user), 0)
