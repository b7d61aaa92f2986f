import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.eviction import Evictable, losses, value, yields

NOW = 10
KEPT = Evictable(nbytes=10, saved=100, used=9, uses=1)


@pytest.mark.parametrize(
    "worse",
    [
        Evictable(nbytes=20, saved=100, used=9, uses=1),
        Evictable(nbytes=10, saved=50, used=9, uses=1),
        Evictable(nbytes=10, saved=100, used=5, uses=1),
        Evictable(nbytes=10, saved=100, used=9, uses=0),
    ],
    ids=["more bytes", "fewer tokens saved", "used longer ago", "used less often"],
)
def test_b2_value_weighs_bytes_tokens_age_and_uses(worse: Evictable) -> None:
    assert value(worse, NOW) < value(KEPT, NOW)


def test_what_frees_nothing_is_worth_more_than_all_that_does() -> None:
    assert value(Evictable(nbytes=0, saved=1, used=0), NOW) > value(Evictable(1, 10**9, NOW, 9), NOW)


def test_case_25_a_conversation_that_merely_waited_is_kept_before_one_that_saves_little() -> None:
    long_waited = Evictable(nbytes=100, saved=60_000, used=40, uses=9)
    fresh = Evictable(nbytes=100, saved=300, used=50, uses=0)
    assert value(fresh, 50) < value(long_waited, 50)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8, unique=True).map(sorted))
def test_the_last_state_of_a_conversation_is_worth_all_that_is_read_without_it(positions: list[int]) -> None:
    last = losses(positions)[-1]
    assert last == positions[-1] - (positions[-2] if len(positions) > 1 else 0)


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True).map(sorted))
def test_states_inside_a_conversation_are_worth_less_than_its_end_and_more_the_more_lies_below(
    positions: list[int],
) -> None:
    *inner, _ = losses(positions)
    gaps = [b - a for a, b in zip([0, *positions], positions, strict=False)][:-1]
    assert all(0 < loss < gap for loss, gap in zip(inner, gaps, strict=True))
    assert sorted(range(len(inner)), key=lambda i: inner[i]) == sorted(
        range(len(gaps)), key=lambda i: gaps[i]
    )


def test_b2_only_what_is_clearly_worth_more_makes_no_room() -> None:
    comes = Evictable(nbytes=10, saved=100, used=10)
    assert yields(Evictable(nbytes=10, saved=200, used=10), comes, NOW)
    assert not yields(Evictable(nbytes=10, saved=900, used=10), comes, NOW)
    assert yields(Evictable(nbytes=10, saved=10**9, used=10), None, NOW)


def test_without_states_nothing_is_lost() -> None:
    assert losses(()) == ()
