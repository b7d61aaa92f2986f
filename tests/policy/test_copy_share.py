"""What copies may take of the time beside running streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.copy_share import BURST_S, SHARE, CopyShare, after_copies, at

WINDOW_S = 2.0


def test_the_beginning_of_a_prompt_is_mounted_at_once_and_what_is_parked_never_is() -> None:
    share = at(at(CopyShare(), 10.0), 10.04)
    assert share.seconds(urgent=True, decoding=True) == BURST_S
    assert share.seconds(urgent=False, decoding=True) == pytest.approx(SHARE * 0.04)


def test_before_anything_has_run_what_nobody_waits_for_gets_nothing() -> None:
    assert at(CopyShare(), 10.0).seconds(urgent=False, decoding=True) == 0


def test_what_was_not_used_is_saved_up_to_a_burst() -> None:
    spent = after_copies(at(CopyShare(), 0.0), BURST_S)
    assert spent.seconds(urgent=True, decoding=True) == 0
    assert at(spent, 0.1).seconds(urgent=True, decoding=True) == pytest.approx(SHARE * 0.1)
    assert at(spent, 1e6).seconds(urgent=True, decoding=True) == BURST_S


def test_a_piece_that_took_too_long_is_paid_back_first() -> None:
    late = after_copies(at(CopyShare(), 0.0), BURST_S + SHARE)
    assert at(late, 0.9).seconds(urgent=True, decoding=True) < 0
    assert at(late, 0.9).seconds(urgent=False, decoding=True) < 0
    assert at(late, 1.1).seconds(urgent=True, decoding=True) > 0


def test_where_no_token_is_drawn_a_request_waits_for_nobodys_sake() -> None:
    broke = after_copies(at(CopyShare(), 0.0), 1.0)
    assert broke.seconds(urgent=True, decoding=False) == BURST_S


@given(
    st.lists(st.tuples(st.floats(0.001, 0.3), st.booleans(), st.floats(0, 1)), min_size=1, max_size=200),
    st.floats(0, 0.002),
)
def test_over_any_two_seconds_streams_lose_less_than_a_tenth(
    turns: list[tuple[float, bool, float]], overrun: float
) -> None:
    """Each turn: so long a step, copies that somebody waits for or not, and how much they use."""
    share, now = CopyShare(), 0.0
    copied: list[tuple[float, float]] = []
    for step, urgent, used in turns:
        now += step
        share = at(share, now)
        seconds = share.seconds(urgent=urgent, decoding=True)
        if seconds > 0:
            took = seconds * used + overrun
            share = after_copies(share, took)
            now += took
            copied.append((now, took))
    for end, _ in copied:
        lost = sum(took for when, took in copied if end - WINDOW_S < when <= end)
        assert lost <= BURST_S + SHARE * WINDOW_S + 2 * 0.002 + 0.3 * SHARE
