import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.eviction import Evictable, value, victims

entries = st.lists(
    st.builds(
        Evictable,
        entry=st.just(0),
        nbytes=st.integers(1, 100),
        saved=st.integers(1, 1000),
        used=st.integers(1, 50),
        uses=st.integers(0, 5),
    ),
    max_size=8,
).map(lambda found: [Evictable(i, e.nbytes, e.saved, e.used, e.uses) for i, e in enumerate(found)])


@given(entries, st.integers(-5, 500))
def test_b2_the_victims_free_what_is_needed_or_nothing_is_evicted(held: list[Evictable], needed: int) -> None:
    chosen = victims(held, needed)
    size = {e.entry: e.nbytes for e in held}
    assert len(set(chosen)) == len(chosen)
    if needed <= 0 or sum(size.values()) < needed:
        assert chosen == ()
    else:
        assert sum(size[i] for i in chosen) >= needed
        assert sum(size[i] for i in chosen[:-1]) < needed


@given(entries.filter(bool))
def test_b2_no_entry_that_stays_is_worth_less_per_byte_than_one_that_goes(held: list[Evictable]) -> None:
    chosen = victims(held, sum(e.nbytes for e in held) // 2 + 1)
    now = max(e.used for e in held)
    goes = [value(e, now) for e in held if e.entry in chosen]
    stays = [value(e, now) for e in held if e.entry not in chosen]
    assert not stays or max(goes) <= min(stays)


@pytest.mark.parametrize(
    "worse",
    [
        Evictable(1, nbytes=20, saved=100, used=9, uses=1),
        Evictable(1, nbytes=10, saved=50, used=9, uses=1),
        Evictable(1, nbytes=10, saved=100, used=5, uses=1),
        Evictable(1, nbytes=10, saved=100, used=9, uses=0),
    ],
    ids=["more bytes", "fewer tokens saved", "used longer ago", "used less often"],
)
def test_b2_value_weighs_bytes_tokens_age_and_uses(worse: Evictable) -> None:
    kept = Evictable(0, nbytes=10, saved=100, used=9, uses=1)
    assert victims([kept, worse], 1) == (1,)


def test_case_25_a_conversation_that_merely_waited_is_kept_before_one_that_saves_little() -> None:
    long_waited = Evictable(0, nbytes=100, saved=60_000, used=40, uses=9)
    fresh = Evictable(1, nbytes=100, saved=300, used=50, uses=0)
    assert victims([long_waited, fresh], 50) == (1,)
