import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.keys import as_keys
from regrow.policy.plan import ChunkTable, MessageMarks, build_plan
from regrow.policy.request import Exactness
from regrow.policy.resume import resume_point
from tests.policy.chats import chat, plan_of

MODES: tuple[Exactness, ...] = ("full", "cache", "off")
PLAN = build_plan(as_keys(range(200)), ChunkTable.uniform(64), MessageMarks())  # cuts at 64, 128, 192
exactness = st.sampled_from(MODES)
positions = st.integers(0, 220)


@given(
    st.integers(1, 220),
    positions,
    positions,
    st.none() | st.frozensets(positions | st.sampled_from([64, 128, 192]), max_size=6),
    exactness,
    st.none() | positions | st.sampled_from([64, 128, 192]),
)
def test_r1_to_r5_hold_for_any_source(
    length: int,
    shared: int,
    pure: int,
    states: frozenset[int] | None,
    exact: Exactness,
    live_end: int | None,
) -> None:
    plan = build_plan(as_keys(range(length)), ChunkTable.uniform(64), MessageMarks())
    p = resume_point(plan, shared, pure, states, exact, live_end)
    assert 0 <= p <= min(shared, length - 1)
    if p and states is not None:
        assert p in states or p == live_end  # R4
    if p and exact != "off":
        assert plan.is_cut(p)  # R1
        assert p <= pure  # R5
    limit = min(shared, length - 1) if exact == "off" else min(shared, length - 1, pure)
    better = [c for c in plan.cuts if p < c <= limit and (states is None or c in states or c == live_end)]
    assert better == []


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("exact", MODES)
def test_r2_one_token_is_always_left_of_a_prompt_of_1_2_or_3(length: int, exact: Exactness) -> None:
    plan = build_plan(as_keys(range(length)), ChunkTable.uniform(64), MessageMarks())
    assert resume_point(plan, length, length, None, exact) == (length - 1 if exact == "off" else 0)
    assert resume_point(plan, length, length, {1, 2, 3}, exact, live_end=3) == 0


@pytest.mark.parametrize("left", [1, 2, 3])
def test_case_16_the_last_cut_is_used_with_1_2_or_3_tokens_left(left: int) -> None:
    plan = build_plan(as_keys(range(128 + left)), ChunkTable.uniform(64), MessageMarks())
    for exact in MODES:
        assert resume_point(plan, plan.length, plan.length, {64, 128}, exact) == 128
    assert plan.chunks_from(128) == (((128, 128 + left),) if left > 1 else ())


def test_r2_a_state_at_the_very_end_of_the_prompt_is_not_used() -> None:
    plan = build_plan(as_keys(range(128)), ChunkTable.uniform(64), MessageMarks())
    assert resume_point(plan, 128, 128, {64, 128}, "full") == 64


def test_case_5_without_a_state_at_the_deepest_shared_cut_the_next_lower_one_is_used() -> None:
    assert resume_point(PLAN, 200, 200, {64}, "full") == 64
    assert resume_point(PLAN, 200, 200, (), "full") == 0


def test_case_11_cells_without_a_running_state_are_no_hit() -> None:
    assert [resume_point(PLAN, 200, 200, frozenset(), exact) for exact in MODES] == [0, 0, 0]


def test_r1_without_running_state_every_cut_counts_and_in_mode_off_every_position() -> None:
    assert [resume_point(PLAN, 150, 200, None, exact) for exact in MODES] == [128, 128, 150]


def test_r5_what_was_decoded_is_resumed_in_mode_off_only() -> None:
    assert [resume_point(PLAN, 200, 100, {64, 128}, exact) for exact in MODES] == [64, 64, 128]
    assert [resume_point(PLAN, 200, 100, None, exact) for exact in MODES] == [64, 64, 199]


def test_r1_the_live_end_is_used_anywhere_in_mode_off_and_at_a_cut_otherwise() -> None:
    assert [resume_point(PLAN, 200, 200, {64}, exact, live_end=150) for exact in MODES] == [64, 64, 150]
    assert [resume_point(PLAN, 200, 200, {64}, exact, live_end=128) for exact in MODES] == [128, 128, 128]
    assert [resume_point(PLAN, 140, 200, {64}, exact, live_end=150) for exact in MODES] == [64, 64, 64]


def test_case_28_a_retry_goes_on_from_the_chunk_at_which_the_first_try_was_cancelled() -> None:
    keys = chat(("system", 600), ("user", 600))
    plan = plan_of(keys)
    reached = 0
    while reached < plan.cuts[-1]:
        further = plan.chunks_from(reached)[0][1]
        assert resume_point(plan, further, further, frozenset(), "full", live_end=further) == further
        assert further > reached
        reached = further
