from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.chain import Chain
from regrow.policy.checkpoints import checkpoint_cuts
from tests.policy.chats import chat, plan_of


def chain_of(*positions: int, protected: frozenset[int] = frozenset()) -> Chain:
    """Entries are taken in the given order."""
    chain = Chain()
    for p in positions:
        chain = chain.added(p, hash_at(p), protected=p in protected)
    return chain


def hash_at(position: int) -> bytes:
    return b"prefix of %d" % position


def test_entries_stand_in_the_order_of_their_positions() -> None:
    chain = chain_of(30, 10, 20)
    assert chain.positions == (10, 20, 30)
    entry = chain.at(20)
    assert entry is not None
    assert entry.entry_id == hash_at(20)
    assert chain.at(25) is None


def test_p5_the_same_position_again_only_moves_the_stamp() -> None:
    chain = chain_of(10, 20)
    again = chain.added(10, b"another", protected=True)
    before, after = chain.at(10), again.at(10)
    assert before is not None
    assert after is not None
    assert (after.entry_id, after.protected) == (before.entry_id, before.protected)
    assert after.used > max(e.used for e in chain.entries)
    assert again.at(20) == chain.at(20)


def test_p5_checkpoints_above_a_rewritten_position_are_dropped() -> None:
    dropped, chain = chain_of(10, 20, 21, 30).cut_back(20)
    assert dropped == (hash_at(21), hash_at(30))
    assert chain.positions == (10, 20)


def test_evicted_entries_leave_the_chain() -> None:
    assert chain_of(10, 20, 30).without({hash_at(10), hash_at(30), hash_at(55)}).positions == (20,)


def test_p5_what_lies_closest_above_another_one_goes_first_so_that_the_rest_is_spread() -> None:
    chain = chain_of(100, 200, 300, 310, 500)
    assert [e.position for e in chain.victims(3)] == [310, 100]
    grown = chain_of(0)
    for position in range(64, 64 * 41, 64):
        _, grown = grown.added(position, hash_at(position), protected=False).limited(6)
    gaps = [b - a for a, b in zip(grown.positions, grown.positions[1:], strict=False)]
    assert len(gaps) == 5
    assert max(gaps) <= 64 * 41 / 2
    assert grown.positions[-1] >= 64 * 30


def test_p5_of_equally_spread_ones_the_least_recently_used_goes() -> None:
    dropped, chain = chain_of(10, 20, 30).touched(10).limited(2)
    assert dropped == (hash_at(20),)
    assert chain.positions == (10, 30)


def test_p5_a_protected_checkpoint_is_no_victim() -> None:
    chain = chain_of(10, 20, 30, protected=frozenset({10, 20}))
    assert [e.position for e in chain.victims(2)] == [30]
    assert [e.position for e in chain.victims(1)] == [30]


def test_p5_a_newer_set_of_protected_ones_replaces_the_older_one() -> None:
    chain = chain_of(10, 20, 30, protected=frozenset({10, 20})).protecting({10, 30})
    assert [e.position for e in chain.victims(2)] == [20]


def test_p5_a_limit_of_0_keeps_not_even_protected_ones() -> None:
    dropped, chain = chain_of(10, 20, protected=frozenset({20})).limited(0)
    assert dropped == (hash_at(10), hash_at(20))
    assert chain.entries == ()


def test_a_chain_is_a_value() -> None:
    chain = chain_of(10, 20)
    for change in (
        chain.touched(10),
        chain.cut_back(0)[1],
        chain.without({hash_at(10)}),
        chain.protecting({20}),
    ):
        assert change != chain
    assert chain == chain_of(10, 20)


operation = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 12), st.booleans()),
    st.tuples(st.sampled_from(["touch", "cut", "evict", "limit"]), st.integers(0, 12), st.booleans()),
)


@given(st.lists(operation, max_size=40))
def test_every_entry_is_in_the_chain_or_was_given_back_once(
    operations: list[tuple[str, int, bool]],
) -> None:
    chain, given_out, gone = Chain(), set[bytes](), list[bytes]()
    for number, (name, n, flag) in enumerate(operations):
        new = hash_at(number)
        if name == "add":
            if chain.at(n) is None:
                given_out.add(new)
            chain = chain.added(n, new, protected=flag)
        elif name == "touch":
            chain = chain.touched(n)
        elif name == "cut":
            dropped, chain = chain.cut_back(n)
            gone += dropped
        elif name == "evict":
            evicted = {e.entry_id for e in chain.entries if e.position == n}
            gone += evicted
            chain = chain.without(evicted)
        else:
            unprotected = [e for e in chain.entries if not e.protected]
            protected = len(chain.entries) - len(unprotected)
            dropped, chain = chain.limited(n)
            gone += dropped
            assert len(chain.entries) <= (max(n, protected) if n else 0)
        assert list(chain.positions) == sorted(set(chain.positions))
        assert len({e.used for e in chain.entries}) == len(chain.entries)
        held = {e.entry_id for e in chain.entries}
        assert sorted([*held, *gone]) == sorted(given_out)


def test_case_7_after_a_long_tool_loop_the_chain_still_has_the_users_turn() -> None:
    parts = [("system", 20), ("user", 10)]
    chain = Chain()
    for _ in range(20):
        for cut in (cuts := checkpoint_cuts(plan_of(chat(*parts)), 128, (), 6)):
            chain = chain.added(cut.position, hash_at(cut.position), protected=cut.protected)
        chain = chain.protecting({c.position for c in cuts if c.protected}).limited(6)[1]
        parts += [("assistant", 15), ("tool", 30)]
    ends = plan_of(chat(*parts)).ends
    assert len(chain.entries) == 6
    assert {ends[0].position, ends[1].position} <= set(chain.positions)
