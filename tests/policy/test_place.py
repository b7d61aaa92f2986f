from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.checkpoints import checkpoint_cuts, last_start, system_end
from regrow.policy.directory import Directory, Holder, HolderId, Match
from regrow.policy.keys import Keys, common_prefix
from regrow.policy.place import Candidate, Rates, cheapest, continues, place
from regrow.policy.request import Exactness
from tests.policy.chats import chat, hashed, plan_of

RATES = Rates(read=500.0)
SYSTEM = ("system", 300)


def slot(
    number: int, keys: Keys | None = None, *, used: int = 0, busy: bool = False, hybrid: bool = True
) -> Holder:
    """A slot that holds a prompt and an answer to it, with the checkpoints that P3 gives it."""
    if keys is None:
        return Holder(HolderId("slot", number), used=used, busy=busy)
    plan = plan_of(keys)
    states = frozenset(c.position for c in checkpoint_cuts(plan, 0, (), 6))
    return Holder(
        HolderId("slot", number),
        length=len(keys) + 50,
        cuts=hashed(keys, plan),
        states=states if hybrid else None,
        pure_length=len(keys) - 1,
        last_start=last_start(plan),
        used=used,
        busy=busy,
    )


def placed(prompt: Keys, *slots: Holder, exact: Exactness = "full") -> Candidate | None:
    directory = Directory()
    for holder in slots:
        directory.update(holder)
    plan = plan_of(prompt)
    matches = directory.lookup(hashed(prompt, plan), exact)
    return place(len(prompt), system_end(plan), slots, matches, RATES)


def where(candidate: Candidate | None) -> tuple[int, str, int]:
    assert candidate is not None
    return candidate.slot, candidate.source, candidate.position


def start(keys: Keys, message: int) -> int:
    return plan_of(keys).ends[message].position


CHAT = chat(SYSTEM, ("user", 20, 1))
NEXT = chat(SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10))
OTHER = chat(SYSTEM, ("user", 20, 2))


def test_s2_the_next_turn_is_served_in_the_slot_of_its_conversation() -> None:
    slots = slot(0), slot(1, OTHER), slot(2, CHAT)
    assert where(placed(NEXT, *slots)) == (2, "checkpoint", start(CHAT, 1))


def test_s2_without_running_state_the_next_turn_goes_on_live() -> None:
    slots = slot(0), slot(1, CHAT, hybrid=False)
    assert where(placed(NEXT, *slots)) == (1, "live", start(CHAT, 1))


def test_s2_an_edited_message_goes_back_in_place_to_the_turn_before_it() -> None:
    edited = chat(SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 11, 7))
    assert where(placed(edited, slot(0), slot(1, NEXT))) == (1, "checkpoint", start(NEXT, 1))


def test_s2_a_new_chat_under_a_known_system_prompt_takes_an_empty_slot() -> None:
    assert where(placed(OTHER, slot(0, CHAT), slot(1), slot(2))) == (1, "none", 0)


def test_s2_a_branch_that_two_conversations_share_belongs_to_neither() -> None:
    one, two, three = (
        chat(SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10, branch)) for branch in range(3)
    )
    assert where(placed(three, slot(0, one), slot(2))) == (0, "checkpoint", start(three, 1))
    assert where(placed(three, slot(0, one), slot(1, two), slot(2))) == (2, "none", 0)


def test_s2_at_the_last_assistant_start_a_conversation_goes_on_though_others_share_it() -> None:
    prefilled = slot(0, CHAT, hybrid=False)
    deeper = (*prefilled.cuts, (prefilled.length, b"part of the answer"))
    holder = Holder(prefilled.id, prefilled.length, deeper, None, prefilled.length, prefilled.last_start)
    match = Match(holder, position=holder.last_start, known=holder.last_start, shared=True)
    assert continues(match, system_end=start(CHAT, 0))
    assert not continues(replace(match, position=holder.last_start - 1), system_end=start(CHAT, 0))


def test_s2_with_no_empty_slot_the_least_recently_used_idle_one_is_taken() -> None:
    strange = chat(("user", 400, 9))
    slots = slot(0, CHAT, used=5), slot(1, OTHER, used=3), slot(2, strange, used=1, busy=True)
    assert where(placed(chat(("user", 33)), *slots)) == (1, "none", 0)


def test_a_prefix_shared_with_the_slot_that_is_overwritten_is_reused() -> None:
    third = chat(SYSTEM, ("user", 20, 3))
    slots = slot(0, CHAT, used=5), slot(1, OTHER, used=3)
    assert where(placed(third, *slots)) == (1, "checkpoint", start(third, 0))


def test_no_idle_slot_means_waiting() -> None:
    assert placed(NEXT, slot(0, CHAT, busy=True), slot(1, busy=True)) is None
    assert placed(NEXT) is None


def test_a_busy_slot_is_never_chosen_not_even_by_its_own_conversation() -> None:
    slots = slot(0, CHAT, busy=True), slot(1, OTHER)
    assert where(placed(NEXT, *slots)) == (1, "checkpoint", start(OTHER, 0))


def test_case_4_of_two_slots_the_one_with_usable_state_is_taken() -> None:
    longer = slot(0, NEXT)
    stateless = Holder(
        longer.id, longer.length, longer.cuts, frozenset(), longer.pure_length, longer.last_start
    )
    following = chat(
        SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10), ("assistant", 9), ("user", 3)
    )
    assert where(placed(following, stateless, slot(1, CHAT))) == (1, "checkpoint", start(CHAT, 1))


def test_of_two_branches_that_a_prompt_continues_the_one_that_saves_more_is_taken() -> None:
    following = chat(
        SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10), ("assistant", 9), ("user", 3)
    )
    assert where(placed(following, slot(0, CHAT), slot(1, NEXT)))[0] == 1


def test_ties_prefer_the_low_slot_number() -> None:
    assert where(placed(NEXT, slot(2, used=1), slot(1, used=2), slot(0, used=3)))[0] == 0
    assert where(placed(NEXT, slot(3, CHAT), slot(1, CHAT)))[0] == 1


def test_case_28_a_retry_takes_the_slot_in_which_the_cancelled_read_left_its_checkpoints() -> None:
    prompt = chat(("system", 900), ("user", 300))
    half = plan_of(prompt).cuts[5]
    assert half < system_end(plan_of(prompt))
    cuts = tuple(cut for cut in hashed(prompt, plan_of(prompt)) if cut[0] <= half)
    cancelled = Holder(HolderId("slot", 1), half, cuts, frozenset({half}), half, last_start(plan_of(prompt)))
    assert where(placed(prompt, slot(0), cancelled)) == (1, "live", half)


def test_a_placement_names_the_version_it_was_made_for() -> None:
    held = slot(0, CHAT)
    newer = Holder(held.id, held.length, held.cuts, held.states, held.pure_length, held.last_start, version=8)
    chosen = placed(NEXT, newer)
    assert chosen is not None
    assert (chosen.holder, chosen.version) == (held.id, 8)


parts = st.lists(
    st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 99), st.integers(0, 1)), max_size=4
)


@given(
    st.lists(st.tuples(st.none() | parts, st.integers(0, 9), st.booleans(), st.booleans()), max_size=5),
    parts,
)
def test_whatever_is_held_the_chosen_slot_is_idle_and_has_what_is_promised(
    held: list[tuple[list[tuple[str, int, int]] | None, int, bool, bool]],
    asked: list[tuple[str, int, int]],
) -> None:
    keys = [None if messages is None else chat(SYSTEM, *messages) for messages, *_ in held]
    slots = [
        slot(i, keys[i], used=used, busy=busy, hybrid=hybrid)
        for i, (_, used, busy, hybrid) in enumerate(held)
    ]
    prompt = chat(SYSTEM, *asked)
    chosen = placed(prompt, *slots)
    if chosen is None:
        assert all(s.busy for s in slots)
        return
    taken, known = slots[chosen.slot], keys[chosen.slot]
    assert not taken.busy
    assert chosen.position <= (0 if known is None else common_prefix(prompt, known))
    assert chosen.position == 0 or taken.usable(chosen.position, "full")
    assert (chosen.source == "none") == (chosen.position == 0)


def candidate(source: str, position: int, copy_bytes: int = 0, number: int = 0) -> Candidate:
    return Candidate(number, source, position, HolderId("slot", 9), 0, copy_bytes)  # type: ignore[arg-type]


FAST = Rates(read=100.0, copy={"slot": 1e9, "root": 1e9, "parked": 1e9, "disk": 1e6})


def test_s1_cost_is_bytes_over_the_lanes_rate_and_tokens_left_over_the_read_rate() -> None:
    assert candidate("slot", 600, 2 * 10**9).cost(1000, FAST) == pytest.approx(2 + 4)
    assert candidate("live", 600).cost(1000, FAST) == pytest.approx(4)


def test_case_27_a_record_that_is_slower_to_load_than_to_read_again_is_not_chosen() -> None:
    load, read = candidate("disk", 900, 20 * 10**6), candidate("none", 0)
    assert cheapest([load, read], 1000, FAST) == read
    assert cheapest([candidate("disk", 900, 2 * 10**6), read], 1000, FAST).source == "disk"


def test_s1_ties_prefer_what_is_in_place_then_memory_then_disk() -> None:
    free = [candidate(source, 500) for source in ("disk", "parked", "checkpoint")]
    assert cheapest(free, 1000, FAST).source == "checkpoint"
    assert cheapest(free[:2], 1000, FAST).source == "parked"
