"""A lazy mask is the dense mask that nobody has asked for yet."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from regrow.gpu.attention import attend_chunk, attend_row
from regrow.gpu.fast import native
from regrow.gpu.lazy_mask import MaskFunction, lazy_mask

FUNCTIONS: dict[str, MaskFunction] = {
    "causal": causal_mask_function,
    "sliding": sliding_window_causal_mask_function(48),
    "chunked": chunked_causal_mask_function(40, torch.zeros(3, dtype=torch.int64)),
}
KERNELS = pytest.mark.parametrize("kernels", ["native", "torch"], indirect=True)
CASES = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(f"no native kernels: {native.state()}")


def unbatched(function: MaskFunction) -> MaskFunction:
    """The function with every row taken for the first."""
    return lambda batch, head, query, cell: function(batch * 0, head, query, cell)


def dense(function: MaskFunction, batch: int, q: int, kv: int, offset: torch.Tensor | int) -> torch.Tensor:
    """The mask by the builder that `transformers` uses for its own attention; offsets a row are its rows'."""
    if isinstance(offset, torch.Tensor):
        rows = [dense(function, 1, q, kv, int(o)) for o in offset]
        return torch.cat(rows)
    mask = sdpa_mask(batch, q, kv, offset, mask_function=function, allow_is_causal_skip=False)
    assert mask is not None
    return mask


@CASES
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 130), (64, 64), (100, 1), (7, 90)])
def test_touched_while_reading_it_is_the_dense_mask(function: MaskFunction, start: int, n: int) -> None:
    mask = lazy_mask(1, n, start + n, start, mask_function=function)
    wanted = dense(function, 1, n, start + n, start)
    assert (mask.shape, mask.dtype, mask.ndim) == (wanted.shape, torch.bool, 4)
    assert torch.equal(mask & torch.ones_like(wanted), wanted)
    assert torch.equal(mask[:, :, -1:], wanted[:, :, -1:])
    assert torch.equal(~mask, ~wanted)


@CASES
def test_touched_in_a_decode_step_it_is_the_dense_mask_of_each_row(function: MaskFunction) -> None:
    lengths = torch.tensor([0, 47, 120])
    mask = lazy_mask(3, 1, 121, lengths, mask_function=function)
    assert torch.equal(mask.dense(), dense(function, 3, 1, 121, lengths))


@CASES
def test_nothing_dense_exists_before_it_is_touched(function: MaskFunction) -> None:
    mask = lazy_mask(1, 4, 30_004, 30_000, mask_function=function)
    mask.chunk_runs()
    assert mask.shape == (1, 1, 4, 30_004)
    assert mask.untouched
    mask.sum()
    assert not mask.untouched


@CASES
def test_a_rows_visible_cells_begin_where_the_dense_mask_says(function: MaskFunction) -> None:
    for lengths in ((*range(100),), (1_000, None, 2_047), (31_999, 2_048, 0)):
        rows = [0 if n is None else n for n in lengths]
        mask = lazy_mask(len(rows), 1, max(rows) + 1, torch.tensor(rows), mask_function=unbatched(function))
        wanted = [
            None if n is None else int(dense(function, 1, 1, n + 1, torch.tensor([n]))[0, 0, 0].nonzero()[0])
            for n in lengths
        ]
        assert mask.row_starts(lengths) == wanted
        ends = [0 if n is None else n + 1 for n in lengths]
        assert mask.row_runs(lengths).tolist() == [[[a or 0] for a in wanted], [[end] for end in ends]]
        assert mask.untouched


@CASES
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 130), (64, 64), (100, 1), (7, 90), (4_000, 33)])
def test_a_chunks_visible_cells_are_those_of_the_dense_mask(
    function: MaskFunction, start: int, n: int
) -> None:
    runs = lazy_mask(1, n, start + n, start, mask_function=function).chunk_runs()
    assert runs is not None
    first, end = runs[:, 0, :, None]
    cell = torch.arange(start + n)
    assert torch.equal((first <= cell) & (cell < end), dense(function, 1, n, start + n, start)[0, 0])


def test_visible_cells_that_are_not_one_run_are_told_apart() -> None:
    window = sliding_window_causal_mask_function(48)
    sink = or_masks(window, lambda batch, head, query, cell: cell < 4)
    mask = lazy_mask(3, 1, 501, torch.tensor([500, 20, 0]), mask_function=sink)
    assert mask.row_starts((500, 20, None)) == [None, 0, None]
    assert mask.row_runs((500, 20, None)).tolist() == [[[0], [0], [0]], [[0], [21], [0]]]
    assert lazy_mask(1, 20, 501, 481, mask_function=sink).chunk_runs() is None
    assert lazy_mask(1, 20, 520, 500, mask_function=window).chunk_runs() is not None


def test_a_chunk_whose_queries_see_beyond_their_own_cell_is_no_run() -> None:
    pair = or_masks(causal_mask_function, lambda batch, head, query, cell: (query == 70) & (cell == 71))
    last = or_masks(causal_mask_function, lambda batch, head, query, cell: cell == 99)
    for function in (pair, last):
        assert lazy_mask(1, 36, 100, 64, mask_function=function).chunk_runs() is None
    assert lazy_mask(1, 7, 71, 64, mask_function=pair).chunk_runs() is not None


def test_only_a_fresh_chunk_within_the_window_is_plain_causal() -> None:
    def plain(function: MaskFunction, start: int, n: int) -> bool:
        return lazy_mask(1, n, start + n, start, mask_function=function).is_plain_causal()

    def everything(batch: object, head: object, query: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return cell >= 0

    assert plain(causal_mask_function, 0, 100)
    assert not plain(causal_mask_function, 1, 100)
    assert plain(sliding_window_causal_mask_function(48), 0, 48)
    assert not plain(sliding_window_causal_mask_function(48), 0, 49)
    assert not plain(everything, 0, 100)


def test_padding_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        lazy_mask(1, 4, 4, attention_mask=torch.ones(1, 4))


@KERNELS
@CASES
@pytest.mark.parametrize("start", [0, 64])
def test_a_chunk_attends_as_by_the_formula(function: MaskFunction, start: int, kernels: None) -> None:
    query, key, value = (
        torch.randn(1, 6, 64, 64),
        torch.randn(1, 2, 64 + start, 64),
        torch.randn(1, 2, 64 + start, 32),
    )
    mask = lazy_mask(1, 64, 64 + start, start, mask_function=function)
    wanted = formula(query, key, value, dense(function, 1, 64, 64 + start, start))
    assert torch.allclose(attend_chunk(query, key, value, mask, None), wanted, atol=1e-5)
    assert torch.allclose(attend_chunk(query, key, value, mask.dense(), None), wanted, atol=1e-5)


@KERNELS
@CASES
def test_a_row_attends_over_its_own_cells_as_by_the_formula(function: MaskFunction, kernels: None) -> None:
    query, key, value = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 121, 64), torch.randn(1, 2, 121, 64)
    mask = lazy_mask(1, 1, 121, torch.tensor([120]), mask_function=function)
    [a] = mask.row_starts((120,))
    wanted = formula(query, key, value, mask.dense())
    assert torch.allclose(attend_row(query, key[:, :, a:], value[:, :, a:], None, None), wanted, atol=1e-5)
    a_head_each = mask.dense().expand(1, 6, 1, 121)
    assert torch.allclose(attend_row(query, key, value, a_head_each, None), wanted, atol=1e-5)


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
