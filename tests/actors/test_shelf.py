"""The shelf: what lies on it is held by somebody, counted once in the ledger, and goes when it is worth least
(B1, B2)."""

from regrow.actors.shelf import Shelf, root_holder
from tests.actors.kept import CELL, KEY, ROOT, STATE, Store, Talk, slot, snapshot

A, B, C = Talk(0, (1,)), Talk(1, (1,)), Talk(2, (1,))


def test_a_state_is_kept_while_somebody_holds_it_and_then_goes_at_once() -> None:
    store = Store()
    prefix = store.state(slot(0), A)
    store.state(slot(1), A)
    assert prefix is not None
    assert store.used == STATE
    store.shelf.let_go(slot(0), [prefix])
    store.check()
    assert store.told.states == {prefix}
    store.shelf.let_go(slot(1), [prefix])
    store.check()
    assert store.told.states == set()
    assert store.used == 0


def test_p5_a_state_that_is_there_already_is_held_not_taken_again() -> None:
    store = Store()
    assert store.shelf.reserve_state(slot(0), A.end, 0) is None, (
        "with a size of 0 only what is there is wanted"
    )
    store.state(slot(0), A)
    assert store.shelf.reserve_state(slot(1), A.end, STATE) == 0
    assert store.shelf.reserve_state(slot(2), A.end, 0) == 0
    assert store.used == STATE
    assert store.shelf.states[A.end].holders == {slot(0), slot(1), slot(2)}


def test_of_two_slots_that_take_one_state_at_once_the_first_keeps_it_for_both() -> None:
    store = Store()
    leases = [store.shelf.reserve_state(slot(i), A.end, STATE) for i in (0, 1)]
    assert store.used == 2 * STATE
    for lease in leases:
        assert lease
        assert store.shelf.keep_state(lease, A.end, snapshot(A.length))
        store.check()
    assert store.used == STATE
    assert store.shelf.states[A.end].holders == {slot(0), slot(1)}


def test_a_lease_that_is_not_filled_is_given_back_once() -> None:
    store = Store()
    lease = store.shelf.reserve_state(slot(0), A.end, STATE)
    assert lease
    store.shelf.give_back([lease])
    store.shelf.give_back([lease, 12345])
    assert not store.shelf.keep_state(lease, A.end, snapshot(A.length))
    store.check()
    assert store.used == 0


def test_a_holder_that_crashes_leaves_neither_states_nor_leases() -> None:
    store = Store()
    store.state(slot(0), A)
    store.state(slot(1), A)
    store.state(slot(0), B)
    store.shelf.reserve_state(slot(0), C.end, STATE)
    store.shelf.forget_holder(slot(0))
    store.check()
    assert store.told.states == {A.end}
    assert store.used == STATE


def test_a_lease_of_an_earlier_life_is_unknown_and_never_somebody_elses() -> None:
    earlier, later = Shelf(1000, life=0), Shelf(1000, life=1)
    old, new = (shelf.reserve_state(slot(0), A.end, STATE) for shelf in (earlier, later))
    assert old
    assert new
    assert old != new
    later.give_back([old])
    assert not later.keep_state(old, A.end, snapshot(A.length))
    assert later.keep_state(new, A.end, snapshot(A.length))


def test_a_state_that_is_used_now_is_not_evicted() -> None:
    store = Store(budget=2 * STATE)
    store.state(slot(0), A)
    store.state(slot(1), B)
    assert store.shelf.pin(A.end) is not None
    assert store.state(slot(2), C) is not None
    store.check()
    assert store.told.states == {A.end, C.end}
    assert store.told.evicted == [(slot(1), B.end)]
    store.shelf.pin(C.end)
    assert store.state(slot(3), B) is None
    store.shelf.unpin(A.end)
    assert store.state(slot(3), B) is not None
    store.check()
    assert store.told.states == {B.end, C.end}


def test_a_state_that_nobody_holds_any_more_stays_while_it_is_used() -> None:
    store = Store()
    store.state(slot(0), A)
    store.shelf.pin(A.end)
    store.shelf.let_go(slot(0), [A.end])
    store.check()
    assert store.told.states == {A.end}
    store.shelf.unpin(A.end)
    store.check()
    assert store.told.states == set()
    assert store.shelf.pin(A.end) is None
    store.shelf.unpin(A.end)


def test_a_state_that_was_purged_in_use_and_taken_anew_outlives_the_end_of_the_old_use() -> None:
    store = Store()
    store.state(slot(0), A)
    store.shelf.pin(A.end)
    store.shelf.purge(frozenset([A.end]))
    store.check()
    assert store.told.states == set()
    store.state(slot(1), A)
    store.check()
    store.shelf.unpin(A.end)
    store.check()
    assert store.told.states == {A.end}


def test_b1_what_can_never_fit_evicts_nothing() -> None:
    store = Store(budget=3 * STATE)
    for i, talk in enumerate((A, B)):
        store.state(slot(i), talk)
    assert not store.shelf.make_room(3 * STATE + 1)
    assert store.shelf.reserve("buffer", 3 * STATE + 1) is None
    store.check()
    assert store.told.states == {A.end, B.end}
    assert not store.shelf.evictions
    assert store.shelf.refusals == 2


def test_b1_what_does_not_fit_beside_what_is_in_use_evicts_nothing_either() -> None:
    store = Store(budget=3 * STATE)
    for i, talk in enumerate((A, B)):
        store.state(slot(i), talk)
    store.shelf.pin(A.end)
    assert not store.shelf.make_room(2 * STATE + 1)
    store.check()
    assert store.told.states == {A.end, B.end}
    assert store.shelf.make_room(2 * STATE)


def test_b1_no_more_is_evicted_than_is_needed() -> None:
    store = Store(budget=4 * STATE)
    for i, talk in enumerate((A, B, C)):
        store.state(slot(i), talk)
    assert store.shelf.make_room(STATE)
    assert len(store.shelf.states) == 3
    assert store.shelf.make_room(STATE + 1)
    assert len(store.shelf.states) == 2
    assert store.shelf.evictions == {"checkpoint": 1}


def test_b2_the_state_that_saves_least_goes_first_though_it_is_the_newest() -> None:
    store = Store(budget=3 * STATE)
    longest, long = Talk(0, (1,) * 20), Talk(1, (1,) * 10)
    store.state(slot(0), longest)
    store.state(slot(1), long)
    store.state(slot(2), C, ROOT)
    assert store.shelf.make_room(STATE)
    store.check()
    assert store.told.states == {longest.end, long.end}


def test_b2_what_was_used_later_stays() -> None:
    store = Store(budget=3 * STATE)
    for i, talk in enumerate((A, B, C)):
        store.state(slot(i), talk)
    store.shelf.pin(A.end)
    store.shelf.unpin(A.end)
    assert store.shelf.make_room(STATE)
    store.check()
    assert store.told.states == {A.end, C.end}


def test_every_holder_of_an_evicted_state_is_told() -> None:
    store = Store()
    root = store.root(A)
    store.state(slot(0), A, ROOT)
    name = store.keep(1, A, states=(ROOT,))
    store.shelf.evict_state(A.prefix(ROOT))
    store.check()
    assert {holder for holder, _ in store.told.evicted} >= {slot(0), name, root}


def test_t1_a_root_keeps_its_state_after_all_conversations_with_it() -> None:
    store = Store()
    store.root(A)
    store.check()
    assert store.told.states == {A.prefix(ROOT)}
    store.shelf.drop_root(A.prefix(ROOT))
    store.shelf.drop_root(A.prefix(ROOT))
    store.check()
    assert store.used == 0


def test_t1_a_root_that_is_known_before_its_state_gets_it_too() -> None:
    store = Store()
    store.shelf.add_root(A.prefix(ROOT), ROOT)
    store.state(slot(0), A, ROOT)
    store.shelf.let_go(slot(0), [A.prefix(ROOT)])
    store.check()
    assert store.told.states == {A.prefix(ROOT)}


def test_t2_a_root_keeps_its_cells_when_the_last_conversation_with_it_goes() -> None:
    for first in ("root", "conversation"):
        store = Store()
        if first == "root":
            root = store.root(A)
            name = store.keep(0, A)
        else:
            name = store.keep(0, A)
            root = store.root(A)
        store.check()
        assert store.told.kept == {name: A.length, root: ROOT}
        store.parking.drop(name)
        store.check()
        assert store.told.kept == {root: ROOT}
        assert store.used == STATE + ROOT * CELL
        assert store.shelf.bytes_by_kind()["root"] == ROOT * CELL


def test_t2_a_root_that_may_have_no_cells_of_its_own_has_none() -> None:
    store = Store(root_cells=False)
    store.root(A)
    name = store.keep(0, A)
    store.parking.drop(name)
    store.check()
    assert store.told.kept == {}
    assert store.used == STATE


def test_t2_a_root_without_its_state_is_none_and_everybody_who_keeps_it_hears_so() -> None:
    """With running state, cells alone cannot be resumed."""
    store = Store()
    root = store.root(A)
    store.parking.drop(store.keep(0, A))
    store.shelf.evict_state(A.prefix(ROOT))
    store.check()
    assert (root, A.prefix(ROOT)) in store.told.evicted
    assert store.shelf.roots == {}
    assert store.told.kept == {}
    assert store.used == 0


def test_b2_a_root_in_use_is_not_evicted_and_one_that_is_not_goes_with_all_it_has() -> None:
    store = Store(budget=STATE + ROOT * CELL + (ROOT + TURN_KEYS) * (CELL + KEY))
    root = store.root(A, state=False)
    store.parking.drop(store.keep(0, A))
    loan = store.lend(root, ROOT)
    assert loan is not None
    assert not store.shelf.make_room(store.budget)
    store.parking.repay(root, None)
    assert store.shelf.make_room(store.budget)
    store.check()
    assert store.shelf.roots == {}
    assert store.used == 0


TURN_KEYS = A.length - ROOT


def test_purging_drops_roots_and_states_held_or_not_and_nothing_else() -> None:
    store = Store()
    store.root(A)
    store.root(B)
    store.state(slot(0), A)
    store.state(slot(0), B)
    store.shelf.purge(frozenset([A.prefix(ROOT), A.end, C.end]))
    store.check()
    assert store.told.states == {B.prefix(ROOT), B.end}
    assert set(store.shelf.roots) == {B.prefix(ROOT)}
    assert set(store.told.evicted) == {
        (slot(0), A.end),
        (root_holder(A.prefix(ROOT)), A.prefix(ROOT)),
    }


def test_forgetting_all_leaves_what_is_in_use_and_says_how_much_went() -> None:
    store = Store()
    store.root(A)
    store.state(slot(0), B)
    store.state(slot(0), C)
    store.shelf.pin(C.end)
    assert store.shelf.forget_all() == 3  # a root, its state, and B's
    store.check()
    assert store.told.states == {C.end}
    assert store.shelf.forget_all() == 0


def test_a_new_engine_is_told_everything_that_is_there() -> None:
    store = Store()
    root = store.root(A)
    name = store.keep(0, A, states=(A.length,))
    store.park(1, B)
    store.check()
    before = store.told.states, store.told.kept
    store.told.states, store.told.kept = set(), {}
    store.shelf.announce()
    store.parking.announce()
    store.check()
    assert (store.told.states, store.told.kept) == before
    assert set(store.told.kept) == {root, name}


def test_news_that_came_and_went_between_two_looks_is_the_last_of_it() -> None:
    store = Store()
    store.state(slot(0), A)
    store.shelf.let_go(slot(0), [A.end])
    changes = store.shelf.news.take()
    assert changes.states_added == frozenset()
    store.parking.drop(store.keep(0, A))
    store.keep(0, B)
    store.check()
    assert len(store.told.kept) == 1
    assert not store.shelf.news.take()


def test_the_bytes_of_each_kind_add_up_to_what_is_used() -> None:
    store = Store()
    store.root(A)
    store.keep(0, A)
    store.keep(1, B, states=(B.length,))
    store.shelf.reserve_state(slot(2), C.end, STATE)
    kinds = store.shelf.bytes_by_kind()
    assert kinds["checkpoint"] == 3 * STATE
    assert kinds["keys"] == (A.length + B.length) * KEY
    assert kinds["parked"] == (A.length + B.length) * CELL
    assert sum(kinds.values()) == store.used
