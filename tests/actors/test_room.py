"""What goes when something needs room: what is worth least, step by step, decided before any goes (B2)."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.eviction import Evictable
from tests.actors.kept import CELL, KEY, ROOT, STATE, TURN, Store, Talk, lent, size, slot

CHAT = Talk(0, (1, 2, 3))


def test_k3_what_only_a_slot_keeps_goes_before_anything_else() -> None:
    store = Store(budget=size(CHAT) + CHAT.length * CELL)
    name = store.keep(0, CHAT)
    store.lend(name, CHAT.length)
    store.parking.repay(name, slot(1))
    other = store.keep(0, Talk(1, (1, 2, 3)))
    assert store.shelf.make_room(1)
    store.check()
    assert store.names == {other}
    assert size(CHAT) < store.used < store.budget
    assert store.shelf.make_room(CHAT.length * CELL)
    store.check()
    assert store.names == {other}


def test_b2_of_two_conversations_the_one_that_saves_less_for_its_bytes_goes_first() -> None:
    store = Store(budget=2 * size(CHAT))
    longer_ago = store.keep(0, CHAT, edges=())
    just_now = store.keep(1, Talk(1, (1, 2, 3)), edges=())
    for _ in range(3):
        assert lent(store, longer_ago, CHAT, ROOT)
    third = store.keep(2, Talk(2, (1, 2, 3)), edges=())
    store.check()
    assert store.names == {longer_ago, third}
    assert just_now not in store.told.kept


def test_b2_a_conversation_that_has_to_make_room_keeps_its_beginning() -> None:
    store = Store(budget=2 * size(CHAT))
    older = store.keep(0, CHAT)
    newer = store.keep(1, Talk(1, (1, 2, 3)))
    assert store.shelf.make_room(1)
    store.check()
    assert (store.told.kept[older], store.told.kept[newer]) == (ROOT, CHAT.length)
    assert lent(store, older, CHAT, ROOT)
    assert store.lend(older, CHAT.length) is None


def test_b2_a_conversation_is_cut_back_to_where_it_has_a_state_and_not_elsewhere() -> None:
    store = Store(budget=10 * size(CHAT))
    turns = [cut for cut, _ in CHAT.cuts]
    name = store.keep(0, CHAT, edges=turns, states=(turns[-3], CHAT.length))
    room = store.shelf.ledger.free + 1
    assert store.shelf.make_room(room)
    store.check()
    assert store.told.kept == {name: turns[-3]}
    assert store.told.states == {CHAT.prefix(turns[-3])}


def test_b2_a_conversation_with_a_state_inside_a_span_goes_with_that_span() -> None:
    store = Store(budget=10 * size(CHAT))
    name = store.keep(0, CHAT, edges=(), states=(ROOT, CHAT.length))
    for _ in range(99):
        store.shelf.pin(CHAT.prefix(ROOT))
        store.shelf.unpin(CHAT.prefix(ROOT))
    assert store.shelf.make_room(store.budget)
    store.check()
    assert name not in store.names
    assert store.used == 0


def test_b2_cells_that_have_lost_the_state_above_them_go_first() -> None:
    store = Store(budget=10 * size(CHAT))
    turns = [cut for cut, _ in CHAT.cuts]
    name = store.keep(0, CHAT, edges=turns, states=(turns[0], CHAT.length))
    store.shelf.evict_state(CHAT.end)
    other = store.keep(1, Talk(1, (1, 2, 3)), edges=())
    assert store.shelf.make_room(store.shelf.ledger.free + 1)
    store.check()
    assert store.told.kept == {name: turns[0], other: CHAT.length}


def test_b2_the_states_inside_a_conversation_go_before_its_end() -> None:
    store = Store(budget=10 * size(CHAT))
    turns = [cut for cut, _ in CHAT.cuts]
    name = store.keep(0, CHAT, edges=turns, states=(ROOT, CHAT.length))
    assert store.shelf.make_room(store.shelf.ledger.free + 1)
    store.check()
    assert store.told.states == {CHAT.end}
    assert store.told.kept == {name: CHAT.length}


def test_b2_what_a_slot_holds_too_goes_before_what_nobody_else_has() -> None:
    store = Store(budget=10 * size(CHAT))
    other = store.keep(1, Talk(1, (1, 2, 3)), states=(CHAT.length,), edges=())
    name = store.keep(0, CHAT, states=(CHAT.length,), edges=())
    store.state(slot(3), CHAT)
    assert store.shelf.make_room(store.shelf.ledger.free + 1)
    store.check()
    assert store.names == {other}
    assert name not in store.told.kept
    assert CHAT.end in store.told.states, "the slot has it still"


def test_b2_what_is_worth_more_makes_no_room_for_what_is_parked() -> None:
    store = Store(budget=2 * size(CHAT) + ROOT * (CELL + KEY))
    old = Talk(2, (1, 2, 3))
    store.state(slot(2), old)
    kept = [store.keep(number, Talk(number, (1, 2, 3)), edges=()) for number in (0, 1)]
    for _ in range(99):
        assert all(lent(store, name, Talk(n, (1, 2, 3)), ROOT) for n, name in enumerate(kept))
    assert store.park(2, old, states=(ROOT, old.length)) is None
    store.check()
    assert store.names == {*kept}


def test_b2_what_cannot_be_parked_has_evicted_nothing_that_is_worth_less_either() -> None:
    small, old = Talk(3), Talk(2, (1, 2, 3))
    store = Store(budget=2 * size(CHAT) + size(small) + STATE)
    store.state(slot(2), old)
    least = store.keep(3, small, edges=())
    kept = [store.keep(number, Talk(number, (1, 2, 3)), edges=()) for number in (0, 1)]
    for _ in range(99):
        assert all(lent(store, name, Talk(n, (1, 2, 3)), ROOT) for n, name in enumerate(kept))
    free = store.shelf.ledger.free
    assert store.park(2, old, edges=(), states=(old.length,)) is None
    store.check()
    assert store.names == {least, *kept}
    assert store.shelf.ledger.free == free
    assert not store.shelf.evictions
    assert store.shelf.refusals == 1


def test_b2_what_goes_for_a_part_of_a_conversation_is_no_more_than_the_part_needs() -> None:
    store = Store(budget=3 * size(CHAT))
    names = [store.keep(number, Talk(number, (1, 2, 3)), edges=()) for number in (0, 1, 2)]
    assert store.lend(names[2], CHAT.length)
    longer = Talk(3, (1,) * 12)
    granted = store.park(3, longer, edges=(ROOT, CHAT.length))
    assert granted is not None
    store.copied(granted[0])
    store.check()
    assert store.told.kept == {names[1]: CHAT.length, names[2]: CHAT.length, granted[0]: CHAT.length}


def test_b2_one_decision_takes_several_steps_of_one_conversation() -> None:
    store = Store(budget=10 * size(CHAT))
    turns = [cut for cut, _ in CHAT.cuts]
    name = store.keep(0, CHAT, edges=turns)
    assert store.shelf.make_room(store.shelf.ledger.free + 2 * TURN * (CELL + KEY))
    store.check()
    assert store.told.kept == {name: CHAT.length - 2 * TURN}


TALKS = st.builds(Talk, st.integers(0, 1), st.lists(st.integers(1, 2), max_size=4).map(tuple))
DEEDS = st.lists(
    st.tuples(st.sampled_from(["keep", "slot", "root", "lend", "take", "let go"]), st.integers(0, 3), TALKS),
    min_size=1,
    max_size=16,
)


def lived(deeds: list[tuple[str, int, Talk]]) -> Store:
    """Return a store where all this was done."""
    store = Store()
    for deed, number, talk in deeds:
        turns = [cut for cut, _ in talk.cuts]
        if deed in ("keep", "slot"):
            store.shelf.forget_holder(slot(number))
        match deed:
            case "keep":
                store.state(slot(number), talk, turns[number % len(turns)])
                granted = store.park(number, talk, turns, turns)
                if granted is not None:
                    store.copied(granted[0])
            case "slot":
                store.state(slot(number), talk)
            case "root":
                store.root(talk, state=number > 0)
            case "let go":
                store.shelf.forget_holder(slot(number))
            case _ if store.names:
                name = sorted(store.names)[number % len(store.names)]
                if store.lend(name, ROOT) and deed == "take":
                    store.parking.repay(name, slot(number))
        store.check()
    return store


@given(DEEDS)
def test_b2_what_is_decided_at_once_is_what_would_go_one_by_one(deeds: list[tuple[str, int, Talk]]) -> None:
    store, other = lived(deeds), lived(deeds)
    at_once = store.shelf.decide(2 * store.budget, None)
    before, one_by_one = other.shelf.ledger.free, Counter[Evictable]()
    while going := other.shelf.decide(other.shelf.ledger.free + 1, None):
        going[0][1].evict()
        other.check()
        one_by_one[going[0][1].worth] += 1
    assert Counter(unit.worth for _, unit in at_once) == one_by_one
    assert store.shelf.obtainable(at_once) - store.shelf.ledger.free == other.shelf.ledger.free - before
