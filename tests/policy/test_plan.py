import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.keys import as_keys
from regrow.policy.plan import ChunkTable, MessageMarks, build_plan
from tests.policy.chats import chat, plan_of

tables = st.lists(st.tuples(st.integers(1, 600), st.sampled_from([64, 128, 256])), max_size=3).map(
    lambda steps: ChunkTable(((0, 128), *sorted(dict(steps).items())))
)


@pytest.mark.parametrize(
    "steps",
    [
        (),
        ((64, 64),),
        ((0, 0),),
        ((0, 100),),
        ((0, -64),),
        ((0, 64), (512, 128), (256, 64)),
        ((0, 64), (0, 128)),
    ],
)
def test_a_chunk_table_refuses_what_is_no_table(steps: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="chunk"):
        ChunkTable(steps)


def test_chunk_sizes_change_at_their_positions() -> None:
    table = ChunkTable(((0, 256), (512, 64)))
    assert [table.size_at(p) for p in (0, 511, 512, 9999)] == [256, 256, 64, 64]
    assert table.grid(700) == (256, 512, 576, 640)


@given(tables, st.integers(0, 1500))
def test_p1_the_grid_is_a_multiple_of_64_at_every_cut_and_ends_below_the_length(
    table: ChunkTable, below: int
) -> None:
    grid = table.grid(below)
    assert all(0 < p < below and p % 64 == 0 for p in grid)
    assert grid == tuple(p for p in table.grid(2000) if p < below)


@given(st.lists(st.integers(0, 150), min_size=1, max_size=6), st.data())
def test_p2_reading_from_a_cut_runs_exactly_the_plans_chunks_beyond_it(
    lengths: list[int], data: st.DataObject
) -> None:
    plan = plan_of(chat(*(("user", n) for n in lengths)))
    start = data.draw(st.sampled_from([0, *plan.cuts]))
    from_zero, from_cut = plan.chunks_from(0), plan.chunks_from(start)
    assert from_cut == tuple(chunk for chunk in from_zero if chunk[0] >= start)
    read = plan.length - plan.is_cut(plan.length - 1)
    assert [p for a, b in from_zero for p in range(a, b)] == list(range(read))


def test_r2_the_last_token_is_left_for_the_first_decode_step_where_there_is_a_cut_before_it() -> None:
    marks = MessageMarks()
    for length, chunks in [
        (1, ((0, 1),)),
        (2, ((0, 2),)),
        (64, ((0, 64),)),
        (65, ((0, 64),)),
        (66, ((0, 64), (64, 66))),
    ]:
        plan = build_plan(as_keys(range(length)), ChunkTable.uniform(64), marks)
        assert plan.chunks_from(0) == chunks
        if length > 1:
            assert plan.cut_at_end().chunks_from(0)[-1][1] == length - 1, "who forks there has read no more"


def test_reading_starts_between_cuts_only_in_mode_off() -> None:
    plan = build_plan(as_keys(range(200)), ChunkTable.uniform(64), MessageMarks())
    with pytest.raises(ValueError, match="100 is not a cut"):
        plan.chunks_from(100)
    assert plan.chunks_from(100, "off") == ((100, 128), (128, 192), (192, 200))


def test_the_deepest_cut_at_or_below_a_position_is_found_or_the_start_is() -> None:
    plan = build_plan(as_keys(range(200)), ChunkTable.uniform(64), MessageMarks())
    assert [plan.last_cut_at_or_below(p) for p in (0, 63, 64, 191, 500)] == [0, 0, 64, 128, 192]
    assert [plan.is_cut(p) for p in (0, 64, 65, 192, 256)] == [False, True, False, True, False]
