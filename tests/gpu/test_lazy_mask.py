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
from regrow.gpu.lazy_mask import MaskFunction, lazy_mask

FUNCTIONS: dict[str, MaskFunction] = {
    "causal": causal_mask_function,
    "sliding": sliding_window_causal_mask_function(48),
    "chunked": chunked_causal_mask_function(40, torch.zeros(3, dtype=torch.int64)),
}
CASES = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


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
    mask.row_start(0, 30_000)
    assert mask.shape == (1, 1, 4, 30_004)
    assert mask.untouched
    mask.sum()
    assert not mask.untouched


@CASES
def test_a_rows_visible_cells_begin_where_the_dense_mask_says(function: MaskFunction) -> None:
    for length in (*range(100), 1_000, 2_047, 2_048, 31_999):
        mask = lazy_mask(1, 1, length + 1, torch.tensor([length]), mask_function=function)
        wanted = int(dense(function, 1, 1, length + 1, length)[0, 0, 0].nonzero()[0])
        assert mask.row_start(0, length) == wanted


def test_visible_cells_that_are_not_one_run_are_told_apart() -> None:
    window = sliding_window_causal_mask_function(48)
    sink = or_masks(window, lambda batch, head, query, cell: cell < 4)
    mask = lazy_mask(1, 1, 501, torch.tensor([500]), mask_function=sink)
    assert mask.row_start(0, 500) is None
    assert lazy_mask(1, 1, 501, torch.tensor([500]), mask_function=window).row_start(0, 500) == 453


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


@CASES
@pytest.mark.parametrize("start", [0, 64])
def test_a_chunk_attends_as_by_the_formula(function: MaskFunction, start: int) -> None:
    query, key, value = (
        torch.randn(1, 6, 64, 64),
        torch.randn(1, 2, 64 + start, 64),
        torch.randn(1, 2, 64 + start, 32),
    )
    mask = lazy_mask(1, 64, 64 + start, start, mask_function=function)
    wanted = formula(query, key, value, dense(function, 1, 64, 64 + start, start))
    assert torch.allclose(attend_chunk(query, key, value, mask, None), wanted, atol=1e-5)
    assert torch.allclose(attend_chunk(query, key, value, mask.dense(), None), wanted, atol=1e-5)


@CASES
def test_a_row_attends_over_its_own_cells_as_by_the_formula(function: MaskFunction) -> None:
    query, key, value = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 121, 64), torch.randn(1, 2, 121, 64)
    mask = lazy_mask(1, 1, 121, torch.tensor([120]), mask_function=function)
    a = mask.row_start(0, 120)
    wanted = formula(query, key, value, mask.dense())
    assert torch.allclose(attend_row(query, key[:, :, a:], value[:, :, a:], None, None), wanted, atol=1e-5)
    a_head_each = mask.dense().expand(1, 6, 1, 121)
    assert torch.allclose(attend_row(query, key, value, a_head_each, None), wanted, atol=1e-5)


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
