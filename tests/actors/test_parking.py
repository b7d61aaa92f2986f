"""Parked conversations: superseded without losing a branch, taken or lent, parked again at the price of what
is new, stored once where they are equal (K1 to K4), and roots that outlive them (T2)."""

import pytest

from regrow.policy.directory import HolderId
from tests.actors.kept import CELL, KEY, ROOT, STATE, TURN, Store, Talk, copy_of, lent, size, slot

CHAT = Talk(0, (1, 2, 3))
ALL_ENDS = tuple(range(ROOT, 200, TURN))


def test_a_conversation_is_known_once_its_cells_have_come_and_not_before() -> None:
    store = Store()
    granted = store.park(0, CHAT)
    assert granted is not None
    name, ranges = granted
    assert ranges == ((0, ROOT), (ROOT, CHAT.length))
    store.check()
    assert store.told.kept == {}
    assert store.lend(name, CHAT.length) is None
    store.copied(name)
    store.check()
    assert store.told.kept == {name: CHAT.length}
    assert lent(store, name, CHAT, CHAT.length)
    assert store.used == size(CHAT)


@pytest.mark.parametrize("position", range(ROOT, CHAT.length + 1, TURN))
def test_k2_any_prefix_of_it_is_lent_and_only_the_whole_can_be_taken(position: int) -> None:
    store = Store()
    name = store.keep(0, CHAT, edges=(ROOT, ROOT + 2 * TURN))
    assert lent(store, name, CHAT, position)
    loan = store.lend(name, position)
    assert loan is not None
    assert loan.whole == (position == CHAT.length)


def test_what_is_not_there_is_not_lent() -> None:
    store = Store()
    name = store.keep(0, CHAT)
    assert store.lend(name, CHAT.length + 1) is None
    assert store.lend(HolderId("parked", 99), ROOT) is None
    assert store.lend(store.root(Talk(5), state=False), ROOT) is None
    store.parking.drop(name)
    assert store.lend(name, ROOT) is None
    store.check()


def test_a_copy_that_failed_leaves_nothing() -> None:
    store = Store()
    granted = store.park(0, CHAT)
    assert granted is not None
    store.copied(granted[0], failed=True)
    store.check()
    assert store.used == 0
    assert store.told.kept == {}


def test_k1_a_conversation_that_went_on_replaces_its_older_copy() -> None:
    store = Store()
    older = store.keep(0, CHAT.upto(2))
    newer = store.keep(0, CHAT)
    store.check()
    assert store.names == {newer}
    assert older not in store.told.kept
    assert store.used == size(CHAT) + 0


def test_k1_the_older_copy_is_there_until_the_newer_one_is() -> None:
    store = Store()
    older = store.keep(0, CHAT.upto(2), states=(ROOT + TURN,))
    granted = store.park(0, CHAT)
    assert granted is not None
    assert lent(store, older, CHAT, ROOT + 2 * TURN)
    store.copied(granted[0], failed=True)
    store.check()
    assert store.names == {older}
    assert lent(store, older, CHAT, ROOT + 2 * TURN)


def test_k1_a_conversation_that_is_kept_already_is_not_parked_again() -> None:
    store = Store()
    store.keep(0, CHAT)
    for again in (CHAT, CHAT.upto(2)):
        assert store.park(1, again) is None
    store.check()
    assert len(store.names) == 1
    assert store.used == size(CHAT)


def test_k1_two_branches_of_one_turn_are_both_kept_and_so_is_a_sibling_that_shares_only_the_root() -> None:
    store = Store()
    talks = [Talk(0, (1, 2, 3)), Talk(0, (1, 2, 4)), Talk(0, (5, 2, 3)), Talk(1, (1, 2, 3))]
    names = [store.keep(0, talk) for talk in talks]
    store.check()
    assert store.names == set(names)
    for name, talk in zip(names, talks, strict=True):
        assert lent(store, name, talk, talk.length)


def test_k1_case_24_nine_turns_of_a_sub_agent_leave_one_copy_and_the_parent_whole() -> None:
    store = Store(budget=size(CHAT) + 2 * size(Talk(0, tuple(range(10, 19)))))
    parent = store.keep(0, CHAT)
    agent = tuple(range(10, 19))
    for turns in range(1, 10):
        last = store.keep(1, Talk(0, agent[:turns]), edges=ALL_ENDS)
    store.check()
    assert store.names == {parent, last}
    assert lent(store, parent, CHAT, CHAT.length)
    assert not store.shelf.evictions


def test_k2_a_match_at_the_end_moves_the_conversation_to_the_slot_which_can_park_it_again_for_nothing() -> (
    None
):
    store = Store()
    name = store.keep(0, CHAT)
    loan = store.lend(name, CHAT.length)
    assert loan is not None
    assert loan.whole
    store.parking.repay(name, slot(1))
    store.check()
    assert store.told.kept == {}
    assert store.used == CHAT.length * CELL
    granted = store.park(1, CHAT)
    assert granted is not None
    assert granted[1] == ()
    store.copied(granted[0])
    store.check()
    assert store.told.kept == {granted[0]: CHAT.length}
    assert lent(store, granted[0], CHAT, CHAT.length)


def test_k2_a_match_inside_borrows_and_the_donor_stays_whole() -> None:
    store = Store()
    name = store.keep(0, CHAT)
    loan = store.lend(name, ROOT + TURN)
    assert loan is not None
    assert not loan.whole
    assert not store.shelf.make_room(store.budget), "it is guarded while it is lent"
    store.parking.repay(name, None)
    store.check()
    assert lent(store, name, CHAT, CHAT.length)


def test_k2_a_conversation_that_is_lent_twice_is_taken_when_both_loans_are_over() -> None:
    store = Store()
    name = store.keep(0, CHAT)
    for position in (CHAT.length, ROOT):
        assert store.lend(name, position) is not None
    store.parking.repay(name, slot(1))
    store.check()
    assert store.names == {name}
    assert not store.shelf.make_room(store.budget)
    store.parking.repay(name, None)
    store.check()
    assert lent(store, name, CHAT, CHAT.length)


def test_k3_the_next_park_of_a_conversation_copies_only_what_is_new() -> None:
    store = Store()
    name = store.keep(0, CHAT.upto(2))
    store.lend(name, CHAT.upto(2).length)
    store.parking.repay(name, slot(1))
    granted = store.park(1, CHAT, edges=(ROOT, ROOT + 2 * TURN))
    assert granted is not None
    assert granted[1] == ((ROOT + 2 * TURN, CHAT.length),)
    store.copied(granted[0])
    store.check()
    assert lent(store, granted[0], CHAT, CHAT.length)
    assert store.used == size(CHAT)


def test_k3_from_the_first_rewritten_position_on_a_slot_keeps_nothing() -> None:
    store = Store()
    name = store.keep(0, CHAT, edges=ALL_ENDS)
    store.lend(name, CHAT.length)
    store.parking.repay(name, slot(1))
    store.shelf.let_go_spans(slot(1), above=ROOT + TURN)
    store.check()
    assert store.used == (ROOT + TURN) * CELL
    edited = Talk(0, (1, 7))
    granted = store.park(1, edited, edges=ALL_ENDS)
    assert granted is not None
    assert granted[1] == ((ROOT + TURN, edited.length),)
    store.copied(granted[0])
    assert lent(store, granted[0], edited, edited.length)


def test_k4_equal_spans_of_two_conversations_are_stored_once_and_go_with_the_last_of_them() -> None:
    store = Store()
    one, other = Talk(0, (1, 2)), Talk(0, (1, 3))
    edges = (ROOT, ROOT + TURN)
    first, second = store.keep(0, one, edges), store.keep(1, other, edges)
    store.check()
    assert store.used == size(one) + size(other) - (ROOT + TURN) * CELL
    store.parking.drop(first)
    store.check()
    assert lent(store, second, other, other.length)
    store.parking.drop(second)
    store.check()
    assert store.used == 0


def test_k4_of_two_conversations_that_are_parked_at_once_each_gets_its_own_cells() -> None:
    for order in ((0, 1), (1, 0)):
        store = Store()
        talks = [Talk(0, (1, 2)), Talk(0, (1, 3))]
        names = []
        for number, talk in enumerate(talks):
            granted = store.park(number, talk, edges=(ROOT, ROOT + TURN))
            assert granted is not None
            names.append(granted[0])
        for number in order:
            store.copied(names[number])
            store.check()
        assert store.told.kept == dict.fromkeys(names, talks[0].length)
        for name, talk in zip(names, talks, strict=True):
            assert lent(store, name, talk, talk.length)


def test_k4_when_the_copy_that_another_one_shares_fails_neither_is_kept_with_a_hole() -> None:
    for order in ((0, 1), (1, 0)):
        store = Store()
        talks = [Talk(0, (1, 2)), Talk(0, (1, 3))]
        names = []
        for number, talk in enumerate(talks):
            granted = store.park(number, talk, edges=(ROOT, ROOT + TURN))
            assert granted is not None
            names.append(granted[0])
        for number in order:
            store.copied(names[number], failed=number == 0)
            store.check()
        assert store.told.kept == {}
        assert store.used == 0


def test_k4_nobody_waits_for_cells_whose_copy_has_failed() -> None:
    store = Store()
    failing, sharing = (store.park(number, talk) for number, talk in enumerate((CHAT, Talk(0, (4,)))))
    assert failing is not None
    assert sharing is not None
    store.copied(failing[0], failed=True)
    name = store.keep(2, CHAT)
    store.copied(sharing[0])
    store.check()
    assert store.told.kept == {name: CHAT.length}
    assert lent(store, name, CHAT, CHAT.length)
    assert store.used == size(CHAT)


def test_t2_where_a_conversation_does_not_fit_the_cells_of_its_root_still_do() -> None:
    store = Store(budget=STATE + ROOT * (CELL + KEY))
    root = store.root(CHAT)
    granted = store.park(0, CHAT)
    assert granted is not None
    assert granted[1] == ((0, ROOT),)
    store.copied(granted[0])
    store.check()
    assert store.told.kept == {granted[0]: ROOT, root: ROOT}
    assert lent(store, root, CHAT, ROOT)


def test_t2_where_not_even_the_root_fits_nothing_changes() -> None:
    store = Store(budget=STATE + ROOT * (CELL + KEY) - 1)
    store.root(CHAT)
    assert store.park(0, CHAT, states=(ROOT,)) is None
    store.check()
    assert store.used == STATE
    assert store.told.states == {CHAT.prefix(ROOT)}


def test_s3_where_there_is_no_room_parking_is_refused_and_evicts_nothing() -> None:
    store = Store(budget=size(CHAT))
    name = store.keep(0, CHAT)
    assert store.park(1, Talk(1, (1, 2, 3, 4)), edges=()) is None
    store.check()
    assert store.names == {name}
    assert not store.shelf.evictions


def test_t2_with_root_cells_never_a_root_gets_none_where_its_conversation_does_not_fit() -> None:
    store = Store(budget=STATE + ROOT * (CELL + KEY), root_cells=False)
    store.root(CHAT)
    assert store.park(0, CHAT, states=(CHAT.length,)) is None
    store.check()


@pytest.mark.parametrize("kind", ["parked", "root"])
def test_t2_a_root_that_a_learned_cut_divides_keeps_its_cells_too(kind: str) -> None:
    """Case 6: a date in the middle of the system prompt is a learned cut, so that the root is two spans."""
    store = Store()
    long_root = Talk(0, (1, 2))
    prefix = long_root.end
    store.parking.add_root(prefix, long_root.length)
    name = store.keep(0, CHAT, edges=(ROOT, long_root.length))
    if kind == "root":
        store.parking.drop(name)
        name = HolderId("root", prefix.hex())
    store.check()
    assert lent(store, name, CHAT, long_root.length)


def test_a_conversation_that_is_on_its_way_or_lent_is_not_evicted() -> None:
    store = Store(budget=2 * size(CHAT))
    name = store.keep(0, CHAT, edges=())
    assert store.park(1, Talk(1, (1, 2, 3)), edges=()) is not None
    loan = store.lend(name, ROOT)
    assert loan is not None
    assert store.park(2, Talk(2, (1, 2, 3)), edges=()) is None
    store.parking.repay(name, None)
    assert store.park(2, Talk(2, (1, 2, 3)), edges=()) is not None
    store.check()
    assert name not in store.names


def test_purging_drops_every_conversation_that_shares_a_cut_whatever_its_age() -> None:
    store = Store()
    store.keep(0, CHAT)
    store.keep(1, Talk(0, (1, 5)))
    other = store.keep(2, Talk(1, (1, 2)))
    store.parking.purge(frozenset([CHAT.prefix(ROOT + TURN)]))
    store.check()
    assert store.names == {other}
    assert store.used == size(Talk(1, (1, 2)))


def test_a_conversation_that_is_purged_while_it_is_lent_or_on_its_way_leaves_nothing() -> None:
    store = Store()
    name = store.keep(0, CHAT)
    store.lend(name, CHAT.length)
    granted = store.park(1, Talk(0, (5,)))
    assert granted is not None
    store.parking.purge(frozenset([CHAT.prefix(ROOT)]))
    store.check()
    assert store.told.kept == {}
    store.parking.repay(name, slot(1))
    store.copied(granted[0])
    store.check()
    assert store.told.kept == {}
    assert store.used == 0


def test_what_was_purged_is_not_shared_by_what_is_parked_after_it() -> None:
    """Its numbers may be wrong: a retry reads afresh and keeps its own."""
    store = Store()
    name = store.keep(0, CHAT)
    store.lend(name, CHAT.length)
    store.parking.purge(frozenset([CHAT.prefix(ROOT)]))
    granted = store.park(1, CHAT)
    assert granted is not None
    assert granted[1] == ((0, ROOT), (ROOT, CHAT.length))
    store.check()
    store.parking.repay(name, None)
    store.copied(granted[0])
    store.check()
    assert lent(store, granted[0], CHAT, CHAT.length)
    assert store.used == size(CHAT)


def test_a_copy_that_fails_after_it_was_purged_takes_nothing_of_what_was_parked_since_with_it() -> None:
    store = Store()
    purged = store.park(0, CHAT)
    assert purged is not None
    store.parking.purge(frozenset([CHAT.prefix(ROOT)]))
    name = store.keep(1, CHAT)
    store.copied(purged[0], failed=True)
    store.check()
    assert lent(store, name, CHAT, CHAT.length)
    assert store.used == size(CHAT)


def test_a_root_that_is_dropped_while_it_is_lent_goes_when_the_loan_is_over() -> None:
    store = Store()
    root = store.root(CHAT)
    store.parking.drop(store.keep(0, CHAT))
    assert store.lend(root, ROOT) is not None
    store.shelf.drop_root(CHAT.prefix(ROOT))
    store.check()
    assert store.used == ROOT * CELL
    store.parking.repay(root, None)
    store.check()
    assert store.used == 0


def test_forgetting_all_drops_every_conversation_but_those_in_use() -> None:
    store = Store()
    names = [store.keep(0, Talk(number, (1,))) for number in range(3)]
    store.lend(names[0], ROOT)
    on_its_way = store.park(1, Talk(3, (1,)))
    assert on_its_way is not None
    assert store.parking.forget_all() == 2
    store.check()
    assert store.names == {names[0], on_its_way[0]}


def test_s8_a_parked_conversation_keeps_its_states_and_shares_them() -> None:
    store = Store()
    name = store.keep(0, CHAT, states=(ROOT, CHAT.length))
    other = store.keep(1, Talk(0, (9,)), states=(ROOT,))
    store.check()
    assert store.told.states == {CHAT.prefix(ROOT), CHAT.end}
    assert store.shelf.states[CHAT.prefix(ROOT)].holders == {name, other}
    store.parking.drop(name)
    store.check()
    assert store.told.states == {CHAT.prefix(ROOT)}


def test_what_an_earlier_life_of_the_cache_was_owed_is_nobodys() -> None:
    earlier, later = Store(life=0), Store(life=1)
    old, new = earlier.park(0, CHAT), later.park(0, Talk(1, (1, 2, 3)))
    assert old is not None
    assert new is not None
    assert old[0] != new[0]
    later.parking.parked(old[0], tuple(copy_of(CHAT, start, stop) for start, stop in old[1]))
    later.parking.repay(old[0], slot(0))
    later.parking.repay(HolderId("root", CHAT.prefix(ROOT).hex()), None)
    later.check()
    assert later.told.kept == {}
    later.copied(new[0])
    assert lent(later, new[0], Talk(1, (1, 2, 3)), CHAT.length)


def test_purging_drops_a_root_whose_cells_share_a_cut_though_it_ends_elsewhere() -> None:
    store = Store()
    long_root = Talk(0, (1,))
    store.shelf.add_root(long_root.end, long_root.length)
    store.parking.drop(store.keep(0, CHAT, edges=(ROOT, long_root.length)))
    store.check()
    assert store.told.kept == {HolderId("root", long_root.end.hex()): long_root.length}
    store.parking.purge(frozenset([CHAT.prefix(ROOT)]))
    store.check()
    assert store.told.kept == {}
    assert store.used == 0


def test_forgetting_all_forgets_what_slots_keep_for_their_next_park() -> None:
    store = Store()
    name = store.keep(0, CHAT)
    store.lend(name, CHAT.length)
    store.parking.repay(name, slot(1))
    assert store.used == CHAT.length * CELL
    store.shelf.forget_all()
    store.check()
    assert store.used == 0
    granted = store.park(1, CHAT)
    assert granted is not None
    assert granted[1] == ((0, ROOT), (ROOT, CHAT.length))
