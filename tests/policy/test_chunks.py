from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.chunks import HELD, MARGIN, STEP, USUAL, Timed, choose_chunks

CONTEXT = 8192
SIZES = (64, 128, 256, 512)


def timed(seconds: Callable[[int, int], float], sizes: tuple[int, ...] = SIZES) -> list[Timed]:
    """Measurements of a machine on which a chunk of n tokens at depth d takes `seconds(n, d)`."""
    return [*(Timed(0, n, seconds(n, 0)) for n in sizes), Timed(4096, 64, seconds(64, 4096))]


def test_a_machine_that_is_fast_enough_reads_the_largest_chunks_everywhere() -> None:
    chosen = choose_chunks(timed(lambda n, d: n * 1e-5 + n * d * 1e-10), 0.2, CONTEXT)
    assert (chosen.table.steps, chosen.stall) == (((0, 512),), HELD)


def test_chunks_get_smaller_with_depth_and_each_is_the_largest_that_fits() -> None:
    def seconds(n: int, d: int) -> float:
        return n * 2**-12 + n * d * 2**-22

    chosen = choose_chunks(timed(seconds), 0.2, CONTEXT)
    assert chosen.table.size_at(0) == 512
    assert chosen.table.size_at(CONTEXT) < 512
    sizes = [size for _, size in chosen.table.steps]
    assert sizes == sorted(sizes, reverse=True)
    assert chosen.stall == HELD


@given(
    st.floats(1e-5, 4e-3),
    st.floats(0, 1e-6),
    st.floats(0, 0.1),
    st.sampled_from([0.05, 0.2, 1.0]),
    st.sampled_from([512, CONTEXT, 131072]),
)
def test_no_chunk_takes_longer_than_it_may_but_those_that_are_told(
    token: float, pair: float, fixed: float, most: float, context: int
) -> None:
    def seconds(n: int, d: int) -> float:
        return fixed + n * token + n * d * pair

    chosen = choose_chunks(timed(seconds), most, context)
    over = None if chosen.stall == HELD else chosen.stall.split()[2].replace(",", "")
    for depth in range(0, context, 64):
        size = chosen.table.size_at(depth)
        fits = seconds(size, depth) <= most * MARGIN + 1e-9
        if over is not None and depth >= int(over):
            assert size == USUAL
            assert seconds(STEP, depth + STEP) > most * MARGIN - 1e-9
            continue
        assert fits
        if size < 512:  # one step deeper a larger one would not fit
            assert seconds(size + STEP, depth + STEP) > most * MARGIN - 1e-9


def test_where_even_the_smallest_chunk_is_too_slow_that_is_said_and_chunks_are_no_smaller_than_usual() -> (
    None
):
    chosen = choose_chunks(timed(lambda n, d: n * 1e-3 + n * d * 1e-6), 0.2, CONTEXT)
    assert [chosen.table.size_at(p) for p in (1855, 1856, CONTEXT)] == [STEP, USUAL, USUAL]
    assert chosen.stall.startswith("from token 1,856 on a chunk takes longer")
    busy = choose_chunks(timed(lambda n, d: 1.0, (64,)), 0.2, CONTEXT)
    assert busy.table.steps == ((0, USUAL),)
    assert busy.stall.startswith("from token 0 on")


def test_without_a_deep_measurement_depth_costs_nothing() -> None:
    assert choose_chunks([Timed(0, 64, 0.1)], 0.2, 64).table.steps == ((0, 64),)


@pytest.mark.parametrize("slow", [64, 128])
def test_one_measurement_that_was_disturbed_does_not_spoil_the_larger_sizes(slow: int) -> None:
    chosen = choose_chunks(timed(lambda n, d: 0.5 if (n, d) == (slow, 0) else n * 1e-4), 0.2, CONTEXT)
    assert chosen.table.steps == ((0, 512),)
