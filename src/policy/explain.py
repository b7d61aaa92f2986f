"""Why a prompt had to be read although something of it was known, in one sentence for a user (E1)."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from regrow.policy.plan import ReadPlan
from regrow.policy.request import CacheUse

MissReason = Literal[
    "cache off",
    "log-probabilities",
    "nothing known",
    "other namespace",
    "no such beginning",
    "between cuts",
    "held elsewhere",
    "on disk",
    "decoded",
    "no checkpoint",
]


@dataclass(frozen=True, slots=True)
class Known:
    """What was known of a prompt when it was placed; lengths in tokens from its start.

    prompts: some prompt is known in its namespace. elsewhere: some are in other namespaces. shared: what the
    nearest known prompt has in common with it. pure: the part of that which was read, never decoded (all of
    it in mode "off"). usable: the most that any holder could give; `holder` names that one, a record on_disk.
    """

    prompts: bool
    elsewhere: bool = False
    shared: int = 0
    pure: int = 0
    usable: int = 0
    holder: str = ""
    on_disk: bool = False


@dataclass(frozen=True, slots=True)
class Miss:
    """Why not more was reused: the kind, to be counted, and one sentence for a user."""

    reason: MissReason
    sentence: str


READ_FOR_LOGPROBS = Miss(
    "log-probabilities",
    "The log-probabilities of the prompt are asked for, so all of it is read.",
)


def why(plan: ReadPlan, known: Known, reused: int, *, chunk: int, cache: CacheUse = "on") -> Miss | None:
    """Return the reason why not more was reused, or None: something was, and it lacks at most two chunks of
    what was known."""
    if cache == "off":
        return Miss("cache off", "The cache is off for this request.")
    if not known.prompts:
        if known.elsewhere:
            sentence = "Prompts are known only for another model, adapter or cache salt."
            return Miss("other namespace", sentence)
        return Miss("nothing known", "No other prompt is known yet.")
    if reused and known.shared - reused <= 2 * chunk:
        return None
    reason, cause = _cause(plan, known, reused)
    return Miss(reason, f"{cause}{_difference(plan, known)}.")


def divergence_message(plan: ReadPlan, position: int) -> tuple[int, str] | None:
    """Return the index, from 0, and the role of the message `position` lies in; None before the first."""
    index = bisect_right(plan.starts, position, key=lambda start: start.position) - 1
    return (index, plan.starts[index].role) if index >= 0 else None


def _cause(plan: ReadPlan, known: Known, reused: int) -> tuple[MissReason, str]:
    cut = plan.last_cut_at_or_below(min(known.shared, plan.length - 1))
    if not known.shared:
        return "no such beginning", "No known prompt begins like this one"
    if cut <= reused:
        place = f"There is no place to resume between positions {reused} and {known.shared}"
        return "between cuts", place
    if known.usable > reused and known.on_disk:
        slow = (
            f"Its first {known.usable} tokens are on disk, which failed or is slower than reading them again"
        )
        return "on disk", slow
    if known.usable > reused:
        held = f"Its first {known.usable} tokens are held by {known.holder}, which another conversation keeps"
        return "held elsewhere", held
    if plan.last_cut_at_or_below(known.pure) <= reused:
        return "decoded", (
            f"What is known between positions {known.pure} and {known.shared} was decoded, not read, "
            "and this exactness mode reuses only what was read"
        )
    return "no checkpoint", f"No checkpoint was kept between positions {reused} and {known.shared}"


def _difference(plan: ReadPlan, known: Known) -> str:
    if known.shared >= plan.length:
        return ""
    message = divergence_message(plan, known.shared)
    inside = f", in message {message[0]} ({message[1]})" if message else ""
    return f"; it first differs from the nearest known prompt at position {known.shared}{inside}"
