import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.eviction import Evictable, value, worst

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


@given(entries)
def test_b2_the_first_to_go_is_worth_least_per_byte(held: list[Evictable]) -> None:
    chosen = worst(held)
    if not held:
        assert chosen is None
        return
    now = max(e.used for e in held)
    assert chosen is not None
    assert value(chosen, now) == min(value(e, now) for e in held)


def test_what_frees_nothing_by_itself_goes_only_where_nothing_else_can_the_oldest_first() -> None:
    freeing = Evictable(0, nbytes=1, saved=1000, used=50, uses=9)
    shared = [
        Evictable(1, nbytes=0, saved=1, used=3, uses=0),
        Evictable(2, nbytes=0, saved=1, used=2, uses=0),
    ]
    assert worst([*shared, freeing]) == freeing
    assert worst(shared) == shared[1]


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
    assert worst([kept, worse]) == worse


def test_case_25_a_conversation_that_merely_waited_is_kept_before_one_that_saves_little() -> None:
    long_waited = Evictable(0, nbytes=100, saved=60_000, used=40, uses=9)
    fresh = Evictable(1, nbytes=100, saved=300, used=50, uses=0)
    assert worst([long_waited, fresh]) == fresh
