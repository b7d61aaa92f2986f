"""Which chunks may have to be parted between their layers while rows run beside them."""

import pytest

from regrow.gpu.pace import Pace

MOST_S = 0.2


class Clock:
    now = 0.0


def pace_beside_rows(clock: Clock, *chunks: tuple[int, int, float]) -> Pace:
    """A pace that has seen these chunks (start, stop, seconds), and whose rows run since now."""
    pace = Pace(0.5, MOST_S, lambda: clock.now)
    for start, stop, seconds in chunks:
        pace.chunk_begins()
        clock.now += seconds
        assert pace.chunk_ends(0, start, stop) == pytest.approx(seconds)
    pace.rows_run(True)
    return pace


def test_nothing_is_parted_where_no_row_runs() -> None:
    pace = Pace(0.5, MOST_S, lambda: 0.0)
    assert not pace.may_part(0, 4096)


def test_a_short_chunk_is_parted_until_one_was_seen_and_a_long_one_always() -> None:
    clock = Clock()
    assert pace_beside_rows(clock).may_part(0, 8)
    assert not pace_beside_rows(clock, (0, 64, 0.01)).may_part(0, 8)
    assert pace_beside_rows(clock, (0, 64, 0.01)).may_part(0, 65)
    assert pace_beside_rows(clock, (0, 31, 0.01)).may_part(0, 64), "it was too short to tell of longer ones"


@pytest.mark.parametrize(
    ("seen", "begins", "parted"),
    [
        ((4000, 4064, 0.05), (4000, 4064), False),
        ((4000, 4064, 0.14), (4000, 4064), True),
        ((4000, 4032, 0.05), (4000, 4064), False),
        ((4000, 4032, 0.07), (4000, 4064), True),
        ((0, 64, 0.05), (120, 184), True),
        ((0, 64, 0.05), (100, 164), False),
        ((4000, 4064, 0.05), (0, 3), False),
    ],
)
def test_what_a_short_chunk_takes_is_told_by_an_earlier_one_its_tokens_and_its_depth(
    seen: tuple[int, int, float], begins: tuple[int, int], parted: bool
) -> None:
    assert pace_beside_rows(Clock(), seen).may_part(*begins) is parted


def test_what_rows_have_waited_already_counts() -> None:
    clock = Clock()
    pace = pace_beside_rows(clock, (0, 64, 0.05))
    clock.now += 0.12
    assert not pace.may_part(0, 64)
    clock.now += 0.01
    assert pace.may_part(0, 64)
