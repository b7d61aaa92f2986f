from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.checkpoints import last_start, system_end
from regrow.policy.directory import Directory, Holder, HolderId, HolderKind, Match
from regrow.policy.keys import Keys, common_prefix
from regrow.policy.place import Candidate, Rates, Targets, cheapest, continues, place
from tests.policy.chats import chat, hashed, plan_of

SYSTEM = ("system", 300)
FAST = Rates(read=100.0, copy={"slot": 1e9, "root": 1e9, "parked": 1e9, "disk": 1e6})
CELL = 10_000  # bytes


@dataclass
class World:
    """What is held where, and how a prompt is placed there. lent: as `Targets` has it."""

    hybrid: bool = True
    rates: Rates = FAST
    cell: int = CELL
    lent: dict[int, int] = field(default_factory=dict)
    slots: list[Holder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = Directory(hybrid=self.hybrid)

    def slot(
        self,
        number: int,
        keys: Keys | None = None,
        *,
        used: int = 0,
        busy: bool = False,
        states: bool = True,
    ) -> "World":
        """Add a slot that holds a prompt and an answer to it, with the checkpoints that P3 gives it."""
        held = Holder(HolderId("slot", number), used=used, busy=busy)
        if keys is not None:
            plan = plan_of(keys)
            held = replace(
                held,
                length=len(keys) + 50,
                cuts=hashed(keys, plan),
                pure_length=len(keys) - 1,
                last_start=last_start(plan),
            )
        return self.with_slot(held, states=states)

    def with_slot(self, held: Holder, *, states: bool = True) -> "World":
        self.slots.append(held)
        self.directory.update(held)
        if states and held.cuts:
            self.keep_states(held)
        return self

    def keep_states(self, held: Holder, kind: HolderKind = "slot") -> None:
        """Keep the states at the ends of the messages of what is held."""
        ends = {p for p, _ in held.cuts if p % 64} | {held.cuts[-1][0]}
        self.directory.states_changed([key for p, key in held.cuts if p in ends], ())

    def parked(self, keys: Keys, kind: HolderKind = "parked") -> "World":
        """Add a parked conversation, or a disk record of one."""
        plan = plan_of(keys)
        end = plan.cuts[-1]
        held = Holder(HolderId(kind, len(self.directory)), end, hashed(keys, plan), end, last_start(plan))
        self.directory.update(held)
        self.keep_states(held)
        return self

    def root(self, keys: Keys) -> "World":
        """Add the root of this prompt, with cells of its own."""
        end = system_end(plan_of(keys))
        cut = next(cut for cut in hashed(keys, plan_of(keys)) if cut[0] == end)
        self.directory.update(Holder(HolderId("root", cut[1].hex()), end, (cut,), end, end))
        self.directory.states_changed([cut[1]], ())
        return self

    def place(self, prompt: Keys) -> Candidate | None:
        plan = plan_of(prompt)
        matches = self.directory.lookup(hashed(prompt, plan), "full")
        targets = Targets(self.slots, self.lent)
        return place(len(prompt), system_end(plan), targets, matches, self.rates, self.cell)

    def where(self, prompt: Keys) -> tuple[int, str, int]:
        chosen = self.place(prompt)
        assert chosen is not None
        return chosen.slot, chosen.source, chosen.position


def start(keys: Keys, message: int) -> int:
    """Where a message that is not the assistant's ends."""
    return plan_of(keys).ends[message].position


CHAT = chat(SYSTEM, ("user", 20, 1))
NEXT = chat(SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10))
THEN_PARTS = (SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10), ("assistant", 9), ("user", 3))
THEN = chat(*THEN_PARTS)
FURTHER = chat(*THEN_PARTS, ("assistant", 20), ("user", 8))
OTHER = chat(SYSTEM, ("user", 20, 2))
ROOT = start(CHAT, 0)


def test_s2_the_next_turn_is_served_in_the_slot_of_its_conversation() -> None:
    world = World().slot(0).slot(1, OTHER).slot(2, CHAT)
    assert world.where(NEXT) == (2, "checkpoint", start(CHAT, 1))


def test_s2_without_running_state_the_next_turn_goes_on_at_the_last_cut_that_was_read() -> None:
    world = World(hybrid=False).slot(0).slot(1, CHAT)
    assert world.where(NEXT) == (1, "checkpoint", start(CHAT, 1))


def test_a_slot_that_ends_where_the_prompt_goes_on_is_live() -> None:
    read = replace(World().slot(1, CHAT).slots[0], length=start(CHAT, 1))
    assert World().slot(0).with_slot(read).where(NEXT) == (1, "live", start(CHAT, 1))


def test_s2_an_edited_message_goes_back_in_place_to_the_turn_before_it() -> None:
    edited = chat(SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 11, 7))
    assert World().slot(0).slot(1, NEXT).where(edited) == (1, "checkpoint", start(NEXT, 1))


def test_s2_a_new_chat_under_a_known_system_prompt_forks_into_an_empty_slot() -> None:
    world = World().slot(0, CHAT).slot(1).slot(2)
    chosen = world.place(OTHER)
    assert chosen == Candidate(1, "slot", ROOT, HolderId("slot", 0), ROOT * CELL)


def test_s2_a_branch_that_two_conversations_share_belongs_to_neither() -> None:
    one, two, three = (
        chat(SYSTEM, ("user", 20, 1), ("assistant", 30, 1), ("user", 10, branch)) for branch in range(3)
    )
    assert World().slot(0, one).slot(2).where(three) == (0, "checkpoint", start(three, 1))
    assert World().slot(0, one).slot(1, two).slot(2).where(three) == (2, "slot", start(three, 1))


def test_s2_at_the_last_assistant_start_a_conversation_goes_on_though_others_share_it() -> None:
    holder = Holder(HolderId("slot", 0), 400, last_start=350)
    match = Match(holder, position=350, known=350, shared=True, deepest=390)
    assert continues(match, system_end=300)
    assert not continues(replace(match, position=349), system_end=300)


def test_s2_where_nothing_deeper_can_be_resumed_no_checkpoint_is_lost_by_going_on_in_place() -> None:
    holder = Holder(HolderId("slot", 0), 400, last_start=350)
    match = Match(holder, position=300, known=340, shared=True, deepest=300)
    assert continues(match, system_end=300)
    assert not continues(replace(match, deepest=320), system_end=300)
    assert not continues(replace(match, position=0, deepest=0), system_end=300)


def test_s2_with_no_empty_slot_the_idle_one_that_costs_least_to_move_is_taken() -> None:
    strange = chat(("user", 400, 9))
    world = World().slot(0, CHAT, used=5).slot(1, OTHER, used=3).slot(2, strange, used=1, busy=True)
    assert world.where(chat(("user", 33))) == (1, "none", 0)
    short = chat(("user", 10))
    world = World().slot(0, CHAT, used=3).slot(1, short, used=5)
    assert world.where(chat(("user", 33))) == (1, "none", 0), "long conversations are long to copy"


def test_a_prefix_shared_with_the_slot_that_is_overwritten_is_reused_without_a_copy() -> None:
    third = chat(SYSTEM, ("user", 20, 3))
    world = World().slot(0, CHAT, used=5).slot(1, OTHER, used=3)
    assert world.where(third) == (1, "checkpoint", ROOT)


def test_no_idle_slot_means_waiting() -> None:
    assert World().slot(0, CHAT, busy=True).slot(1, busy=True).place(NEXT) is None
    assert World().place(NEXT) is None


def test_s1_a_busy_slot_is_never_written_but_it_is_copied_from() -> None:
    world = World().slot(0, CHAT, busy=True).slot(1)
    assert world.place(NEXT) == Candidate(
        1, "slot", start(CHAT, 1), HolderId("slot", 0), start(CHAT, 1) * CELL
    )


def test_case_4_of_two_slots_the_one_with_usable_state_is_taken() -> None:
    world = World().slot(0, NEXT, states=False).slot(1, CHAT)
    assert world.where(THEN) == (0, "checkpoint", start(CHAT, 1))
    beyond = World().slot(0, NEXT, states=False).slot(1, OTHER)
    assert beyond.where(NEXT)[2] == ROOT


def test_of_two_branches_that_a_prompt_continues_the_one_that_saves_more_is_taken() -> None:
    assert World().slot(0, CHAT).slot(1, NEXT).where(THEN)[0] == 1


def test_s1_a_conversation_that_is_held_further_elsewhere_goes_on_from_there() -> None:
    """Its older copy in an idle slot is in place, and yet to read on from it would cost more."""
    older = World().slot(0, CHAT).slot(1)
    assert older.parked(THEN).where(FURTHER) == (1, "parked", start(THEN, 3))
    older = World().slot(0, CHAT).slot(1).slot(2, THEN, busy=True)
    assert older.where(FURTHER) == (1, "slot", start(THEN, 3))


def test_ties_prefer_the_low_slot_number() -> None:
    assert World().slot(2, used=1).slot(1, used=2).slot(0, used=3).where(NEXT)[0] == 0
    assert World().slot(3, CHAT).slot(1, CHAT).where(NEXT)[0] == 1


def test_case_28_a_retry_takes_the_slot_in_which_the_cancelled_read_left_its_checkpoints() -> None:
    prompt = chat(("system", 900), ("user", 300))
    plan = plan_of(prompt)
    half = plan.cuts[5]
    assert half < system_end(plan)
    cuts = tuple(cut for cut in hashed(prompt, plan) if cut[0] <= half)
    cancelled = Holder(HolderId("slot", 1), half, cuts, half, last_start(plan))
    assert World().slot(0).with_slot(cancelled).where(prompt) == (1, "live", half)


def test_t2_a_root_is_mounted_from_each_kind_of_holder() -> None:
    holders = {
        "slot": World().slot(0, CHAT, busy=True),
        "root": World().slot(0, busy=True).root(CHAT),
        "parked": World().slot(0, busy=True).parked(CHAT),
    }
    for kind, world in holders.items():
        assert world.slot(1).where(OTHER) == (1, kind, ROOT)


def test_t3_a_longer_ordinary_match_wins_over_a_root() -> None:
    world = World().slot(0, busy=True).slot(1).root(CHAT).parked(CHAT)
    assert world.where(NEXT) == (1, "parked", start(CHAT, 1))


@pytest.mark.parametrize(("lane", "source"), [(1e9, "slot"), (1e3, "none")])
def test_s1_a_copy_that_takes_longer_than_reading_again_is_not_made(lane: float, source: str) -> None:
    world = World(rates=Rates(read=100.0, copy={"slot": lane})).slot(0, CHAT).slot(1)
    assert world.where(OTHER)[1] == source


def test_s1_of_several_sources_the_one_that_is_copied_faster_is_taken() -> None:
    for fast, slow in (("slot", "parked"), ("parked", "slot")):
        rates = Rates(read=100.0, copy={fast: 1e9, slow: 1e8})  # type: ignore[dict-item]
        world = World(rates=rates).slot(0, CHAT, busy=True).slot(1).parked(CHAT)
        assert world.where(OTHER) == (1, fast, ROOT)


def test_s1_a_little_more_of_a_prefix_is_not_worth_a_slow_copy() -> None:
    rates = Rates(read=1000.0, copy={"slot": 1e9, "parked": 1e7})
    world = World(rates=rates).slot(0, OTHER, busy=True).slot(1).parked(CHAT)
    assert start(CHAT, 1) > ROOT
    assert world.where(NEXT) == (1, "slot", ROOT)


def test_a_slot_that_is_lent_is_not_forked_into_and_waiting_is_for_its_copy() -> None:
    world = World(lent={1: 64}).slot(0, CHAT, busy=True).slot(1)
    assert world.place(OTHER) is None
    assert World(lent={0: 64}).slot(0, CHAT).slot(1).slot(2).where(OTHER) == (1, "slot", ROOT)


def test_a_slot_that_is_lent_goes_on_in_place_only_at_or_above_what_is_lent() -> None:
    at = start(CHAT, 1)
    assert World(lent={0: at}).slot(0, CHAT).where(NEXT) == (0, "checkpoint", at)
    assert World(lent={0: at + 1}).slot(0, CHAT).slot(1).where(NEXT) == (1, "slot", at)
    assert World(lent={0: at + 1}).slot(0, CHAT).place(NEXT) is None


def test_two_forks_copy_from_one_donor_at_a_time() -> None:
    world = World(lent={0: ROOT}).slot(0, CHAT).slot(1, busy=True).slot(2)
    assert world.where(OTHER) == (2, "slot", ROOT)


parts = st.lists(
    st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 99), st.integers(0, 1)), max_size=4
)
held_slots = st.lists(
    st.tuples(
        st.none() | parts, st.integers(0, 9), st.booleans(), st.booleans(), st.sampled_from([0, 0, 64, 400])
    ),
    max_size=5,
)


@given(held_slots, st.lists(parts, max_size=2), parts, st.booleans(), st.sampled_from([1e5, 1e9]))
def test_whatever_is_held_the_choice_can_be_carried_out_and_no_other_source_is_cheaper(
    held: list[tuple[list[tuple[str, int, int]] | None, int, bool, bool, int]],
    parked: list[list[tuple[str, int, int]]],
    asked: list[tuple[str, int, int]],
    hybrid: bool,
    lane: float,
) -> None:
    rates = Rates(read=100.0, copy={"slot": lane, "parked": lane})
    lent = {i: below for i, (*_, below) in enumerate(held) if below}
    world = World(hybrid, rates=rates, lent=lent)
    keys: dict[HolderId, Keys | None] = {}
    for i, (messages, used, busy, states, _) in enumerate(held):
        keys[HolderId("slot", i)] = None if messages is None else chat(SYSTEM, *messages)
        world.slot(i, keys[HolderId("slot", i)], used=used, busy=busy, states=states)
    for messages in parked:
        keys[HolderId("parked", len(world.directory))] = chat(SYSTEM, *messages)
        world.parked(chat(SYSTEM, *messages))
    prompt = chat(SYSTEM, *asked)
    chosen = world.place(prompt)
    free = [s for s in world.slots if not s.busy and not lent.get(int(s.id.key), 0)]
    if chosen is None:
        assert not free
        return
    slot = world.slots[chosen.slot]
    in_place = chosen.holder == slot.id
    assert not slot.busy
    assert lent.get(chosen.slot, 0) <= (chosen.position if in_place else 0)
    assert (chosen.source == "none") == (chosen.position == 0) == (chosen.holder is None)
    assert chosen.copy_bytes == (0 if in_place or chosen.holder is None else chosen.position * CELL)
    if chosen.holder is not None:
        source = keys[chosen.holder]
        assert source is not None
        assert chosen.position <= common_prefix(prompt, source)
    for match in world.directory.lookup(hashed(prompt, plan_of(prompt)), "full"):
        kind, position = match.holder.id.kind, match.position
        if free and position:
            copied = Candidate(chosen.slot, kind, position, match.holder.id, position * CELL)
            assert chosen.cost(len(prompt), rates) <= copied.cost(len(prompt), rates)


def candidate(source: str, position: int, copy_bytes: int = 0, number: int = 0) -> Candidate:
    return Candidate(number, source, position, HolderId("slot", 9), copy_bytes)  # type: ignore[arg-type]


def test_s1_cost_is_bytes_over_the_lanes_rate_and_tokens_left_over_the_read_rate() -> None:
    assert candidate("slot", 600, 2 * 10**9).cost(1000, FAST) == pytest.approx(2 + 4)
    assert candidate("live", 600).cost(1000, FAST) == pytest.approx(4)


def test_case_27_a_record_that_is_slower_to_load_than_to_read_again_is_not_chosen() -> None:
    load, read = candidate("disk", 900, 20 * 10**6), candidate("none", 0)
    assert cheapest([load, read], 1000, FAST) == read
    assert cheapest([candidate("disk", 900, 2 * 10**6), read], 1000, FAST).source == "disk"


def test_s1_a_record_is_read_into_memory_first_and_with_its_states() -> None:
    rates = Rates(read=100.0, copy={"parked": 1e6, "disk": 2e6})
    assert candidate("disk", 900, 10**6).cost(1000, rates) == pytest.approx(1 + 0.5 + 1)
    cuts = hashed(CHAT, plan_of(CHAT))
    states = frozenset(key for _, key in cuts[:2])
    record = Holder(HolderId("disk", "r"), len(CHAT), cuts, len(CHAT), states=states)
    empty = Targets([Holder(HolderId("slot", 0))])
    for position, held in ((cuts[0][0], 1), (cuts[1][0], 2), (cuts[-1][0], 2)):
        match = Match(record, position, position, shared=False)
        chosen = place(len(CHAT), 0, empty, [match], FAST, 10, 1000)
        assert chosen is not None
        assert (chosen.source, chosen.copy_bytes) == ("disk", position * 10 + held * 1000)


def test_s1_ties_prefer_what_is_in_place_then_memory_then_disk() -> None:
    free = [candidate(source, 500) for source in ("disk", "parked", "checkpoint")]
    assert cheapest(free, 1000, FAST).source == "checkpoint"
    assert cheapest(free[:2], 1000, FAST).source == "parked"
