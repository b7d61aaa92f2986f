"""Native attention against its formula: any shape, each query over its own run of cells, and the same bits
whatever else is in the call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.gpu.fast import native
from regrow.gpu.fast.attention import attend, native_lent, serves
from regrow.gpu.lent import LentLayer

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.state())
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 5]),  # key heads
    st.sampled_from([1, 2, 3, 7, 16]),  # heads that share one
    st.sampled_from([16, 33, 48, 64, 80, 128, 256]),
    st.sampled_from([16, 20, 32, 64, 128, 256]),
)
BEHIND = 5  # cells of an arena behind those of the longest row


class Arena:
    """Random queries [rows, heads, n, dim], keys and values [rows, kv_heads, cells + BEHIND, dim]."""

    def __init__(self, shape: tuple[int, int, int, int], rows: int, n: int, cells: int, dtype: torch.dtype):
        kv, groups, dim, value_dim = shape
        generator = torch.Generator().manual_seed(cells)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.cells = cells
        self.query = normal(rows, n, kv * groups, dim).transpose(1, 2)
        self.key, self.value = (
            normal(rows, kv, cells + BEHIND, dim),
            normal(rows, kv, cells + BEHIND, value_dim),
        )

    def attend(
        self, runs: torch.Tensor, rows: slice = slice(None), scale: float | None = None
    ) -> torch.Tensor:
        given = (x[rows] for x in (self.query, self.key[:, :, : self.cells], self.value[:, :, : self.cells]))
        return attend(*given, runs[:, rows].contiguous(), scale)

    def formula(self, runs: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (x.double().repeat_interleave(groups, dim=1) for x in (self.key, self.value))
        scores = self.query.double() @ key.transpose(-1, -2) * (scale or key.shape[-1] ** -0.5)
        cell = torch.arange(key.shape[2])
        seen = (runs[0, :, None, :, None] <= cell) & (cell < runs[1, :, None, :, None])
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0) @ value

    def spoil_unseen(self, runs: torch.Tensor) -> None:
        """Put NaN into every cell that no query of its row sees."""
        for row, (first, end) in enumerate(zip(runs[0], runs[1], strict=True)):
            seen = end > 0
            a, b = (int(first[seen].min()), int(end.max())) if seen.any() else (0, 0)
            for arena in (self.key, self.value):
                arena[row, :, :a] = arena[row, :, b:] = float("nan")


def runs_of(first: list[list[int]], end: list[list[int]]) -> torch.Tensor:
    return torch.tensor([first, end], dtype=torch.int32)


def chunk_runs(start: int, n: int, window: int) -> torch.Tensor:
    end = range(start + 1, start + n + 1)
    return runs_of([[max(0, e - window) for e in end]], [list(end)])


@settings(max_examples=150, deadline=None)
@given(
    SHAPES,
    st.lists(st.tuples(st.integers(0, 1_100), st.integers(0, 1_100)), min_size=1, max_size=5),
    st.sampled_from(list(DTYPES)),
)
def test_rows_of_a_step_attend_over_exactly_their_own_cells(
    shape: tuple[int, int, int, int], spans: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    runs = runs_of(
        [[min(span)] for span in spans], [[max(span) if span[0] != span[1] else 0] for span in spans]
    )
    arena = Arena(shape, len(spans), 1, max(1, int(runs[1].max())), dtype)
    wanted = arena.formula(runs)
    arena.spoil_unseen(runs)
    got = arena.attend(runs)
    assert torch.allclose(got.double(), wanted, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    for row in range(len(spans)):
        assert torch.equal(arena.attend(runs, slice(row, row + 1)), got[row : row + 1])


@settings(max_examples=150, deadline=None)
@given(
    SHAPES,
    st.sampled_from([0, 1, 31, 130, 500, 512, 1_300]),
    st.sampled_from([1, 2, 20, 33, 64, 150]),
    st.sampled_from([1, 7, 48, 600, 10_000]),
    st.sampled_from(list(DTYPES)),
)
def test_queries_of_a_chunk_see_the_past_and_their_chunk_up_to_themselves_within_a_window(
    shape: tuple[int, int, int, int], start: int, n: int, window: int, dtype: torch.dtype
) -> None:
    runs = chunk_runs(start, n, window)
    arena = Arena(shape, 1, n, start + n, dtype)
    wanted = arena.formula(runs, scale=0.2)
    arena.spoil_unseen(runs)
    got = arena.attend(runs, scale=0.2)
    assert got.shape == wanted.shape
    assert torch.allclose(got.double(), wanted, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_neighbours_and_places_change_no_bit(dtype: torch.dtype) -> None:
    ends = [[1_900], [3], [0], [513], [512], [1_024]]
    runs = runs_of([[0]] * len(ends), ends)
    arena = Arena((3, 3, 64, 64), len(ends), 1, 1_900, dtype)
    wanted = arena.attend(runs)
    assert not wanted[2].any()
    torch.set_num_threads(3)
    assert torch.equal(arena.attend(runs), wanted)
    assert torch.equal(arena.attend(runs, slice(3, 6)), wanted[3:6])
    chunk, seen = Arena((3, 3, 64, 64), 1, 90, 990, dtype), chunk_runs(900, 90, 10_000)
    several = chunk.attend(seen)
    torch.set_num_threads(1)
    assert torch.equal(chunk.attend(seen), several)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_and_equal_scores_are_weighed_right(dtype: torch.dtype) -> None:
    arena, runs = Arena((1, 2, 64, 64), 1, 40, 700, dtype), chunk_runs(660, 40, 10_000)
    for by in (0.0, 30.0):
        arena.query = arena.query * by
        wanted = arena.formula(runs)
        assert torch.allclose(arena.attend(runs).double(), wanted, atol=5e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_comes_out_where_it_was_seen_and_nowhere_else(dtype: torch.dtype) -> None:
    arena, runs = Arena((2, 2, 64, 64), 3, 1, 600, dtype), runs_of([[0]] * 3, [[600], [550], [600]])
    arena.key[0, :, 580, 5] = float("nan")
    arena.query[2, :, :, 9] = float("nan")
    got = arena.attend(runs)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()
    assert got[2].isnan().all()


def test_what_is_not_served_is_told() -> None:
    query = torch.zeros(1, 2, 1, 64)
    assert serves(query, query, query)
    assert not serves(query.double(), query.double(), query.double())
    assert not serves(query, query.bfloat16(), query.bfloat16())
    assert not serves(query, query.transpose(2, 3), query)
    assert not serves(query.expand(1, 2, 1, 64), query, torch.zeros(1, 2, 1, 300))


def test_shapes_that_do_not_fit_are_refused_before_anything_is_read() -> None:
    query, key, runs = torch.zeros(1, 4, 3, 64), torch.zeros(1, 2, 10, 64), chunk_runs(7, 3, 100)
    assert attend(query, key, key, runs, None).shape == (1, 4, 3, 64)
    for wrong in (
        (query.expand(2, -1, -1, -1), key, key, runs),
        (query, key, key[:, :, :9], runs),
        (query, key[:, :, :9], key[:, :, :9], runs),
        (query, key, key, chunk_runs(7, 2, 100)),
        (query, key, key, runs - 8),
        (query[:, :3], key, key, runs),
        (query, key[..., :32], key, runs),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            attend(*wrong, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dim", [64, 80])  # 80: of no whole tiles, and cells that no cache line begins with
@pytest.mark.parametrize("n", [1, 5, 200])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 128), (0, 900), (40, 100), (40, 300), (130, 1500), (256, 384)]
)
def test_attention_reads_lent_cells_where_they_lie_and_puts_them_where_they_belong(
    dtype: torch.dtype, dim: int, n: int, start: int, stop: int
) -> None:
    past, heads, kv_heads = 1500, 6, 2
    query = torch.randn(1, heads, n, dim).to(dtype)
    wanted = [torch.randn(1, kv_heads, past + n + 3, dim).to(dtype) for _ in range(2)]
    cells = [arena.clone() for arena in wanted]
    given = [arena[0, :, start:stop].clone() for arena in wanted]
    for arena in cells:
        arena[0, :, start:stop] = float("nan")
    end = torch.arange(past + 1, past + n + 1)
    runs = torch.stack([torch.zeros_like(end), end]).int()[:, None]
    straight = attend(query, *wanted, runs, None)
    lent = attend(query, *cells, runs, None, native_lent(LentLayer(start, stop, *given)))
    assert torch.equal(lent, straight)
    for found, kept in zip(cells, wanted, strict=True):
        assert torch.equal(found, kept)


def test_cells_that_not_every_query_sees_cannot_be_lent() -> None:
    query, cells = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 200, 16)
    lent = native_lent(LentLayer(0, 150, cells[0], cells[0]))
    for first, end in ([0, 1], [200, 200]), ([0, 0], [200, 149]):
        with pytest.raises(ValueError, match="do not fit"):
            attend(query, cells, cells, torch.tensor([[first], [end]], dtype=torch.int32), None, lent)
