import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.eviction import Evictable, height, value, values
from regrow.policy.ranking import FEW, Ranking

ENTRIES = st.builds(
    Evictable,
    nbytes=st.integers(0, 1000),
    saved=st.integers(0, 50),
    used=st.integers(0, 9),
    uses=st.integers(0, 9),
)
PUTS = st.lists(st.tuples(st.integers(0, 40), st.none() | ENTRIES), max_size=200)


def ranking_of(puts: list[tuple[int, Evictable | None]]) -> tuple[Ranking[int], dict[int, Evictable]]:
    ranking, left = Ranking[int](), dict[int, Evictable]()
    for name, entry in puts:
        ranking.put(name, entry)
        left.pop(name, None)
        if entry is not None:
            left[name] = entry
    return ranking, left


@given(PUTS, st.integers(0, 20))
def test_b2_what_is_left_comes_once_each_by_its_value(
    puts: list[tuple[int, Evictable | None]], now: int
) -> None:
    ranking, left = ranking_of(puts)
    given = list(ranking.ascending(now))
    assert {name: entry for _, name, entry in given} == left == ranking.entries()
    assert len(given) == len(left)
    assert [worth for worth, _, _ in given] == sorted(worth for worth, _, _ in given)
    assert [worth for worth, _, _ in given] == pytest.approx([value(entry, now) for _, _, entry in given])


@pytest.mark.parametrize("count", [FEW - 1, FEW, FEW + 1, 9 * FEW, 1000])
@pytest.mark.parametrize("levels", [1, 7, 10_000], ids=["all alike", "many alike", "few alike"])
def test_however_many_are_alike_none_is_left_out(count: int, levels: int) -> None:
    ranking, _ = ranking_of([(n, Evictable(1, n * 7919 % levels, 0)) for n in range(count)])
    assert sorted(name for _, name, _ in ranking.ascending(3)) == list(range(count))


@given(st.lists(ENTRIES, min_size=1), st.integers(0, 20))
def test_the_values_of_many_are_those_of_each(entries: list[Evictable], now: int) -> None:
    heights = np.array([height(entry) for entry in entries])
    used = np.array([entry.used for entry in entries])
    assert values(heights, used, now).tolist() == pytest.approx([value(entry, now) for entry in entries])
