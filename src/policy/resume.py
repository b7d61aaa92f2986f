"""Where a prompt can go on from what a source holds (R1 to R5)."""

from collections.abc import Collection

from regrow.policy.plan import ReadPlan
from regrow.policy.request import Exactness


def resume_point(
    plan: ReadPlan,
    shared: int,
    pure_length: int,
    states: Collection[int] | None,
    exact: Exactness,
    live_end: int | None = None,
) -> int:
    """Return how many of the prompt's tokens the source saves from reading; 0 means none.

    shared: leading keys that prompt and source share, within one namespace (R3). pure_length: the source's
    keys below it were read by the plan, never decoded (R5). states: positions at which the source has a
    running state of every kind (R4); None for a model without running state, where every position has one.
    live_end: the length of the source's keys, where its live running state is there.

    The result leaves at least one token to feed (R2). It is a pure cut of the plan (R1), except in mode
    "off": there the live end counts wherever it is, and without running state any position does.
    """
    limit = max(min(shared, plan.length - 1), 0)
    if exact != "off":
        limit = min(limit, pure_length)
    if states is None:
        return limit if exact == "off" else plan.last_cut_at_or_below(limit)
    usable = {p for p in states if p <= limit and plan.is_cut(p)}
    if live_end is not None and live_end <= limit and (exact == "off" or plan.is_cut(live_end)):
        usable.add(live_end)
    return max(usable, default=0)
