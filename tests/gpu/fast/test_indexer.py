"""The indexer for all queries at once chooses what the model's own loop chooses, ties included."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

from regrow.gpu.call import Decoding, mark
from regrow.gpu.fast import indexer as fast
from regrow.gpu.fast.chosen import ChosenCells
from regrow.gpu.fast.indexer import use_fast_indexers
from regrow.gpu.lazy_mask import LazyMask, lazy_mask
from regrow.models.random_models import random_config
from tests.gpu.drive import DTYPES

SIZE, MOST = 4, 4  # cells of a block, blocks that are chosen
DIM = 64


def build(heads: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    config = random_config("qwen4_exp")
    config.indexer_n_heads = heads
    indexer = Qwen4ExpTextQSAIndexer(config, 0)
    generator = torch.Generator().manual_seed(3)
    for parameter in indexer.parameters():
        parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    assert (indexer.compress_ratio, indexer.block_topk) == (SIZE, MOST)
    return indexer.to(dtype)


@dataclass
class Past:
    """The cells [rows, cells, dim] of a cache, and where each row's next token goes."""

    cells: torch.Tensor
    starts: list[int]

    def update_indexer(self, new: torch.Tensor, layer: int) -> torch.Tensor:
        for row, start in enumerate(self.starts):
            self.cells[row, start : start + new.shape[1]] = new[row].view(-1, DIM)
        return self.cells


def chosen_by_both(
    indexer: Any, starts: list[int], n: int, seed: int = 0, alike: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, LazyMask]:
    """Return what the loop and the fast form choose for `n` tokens a row from cell `starts` on.

    alike: tokens and past keys are drawn from so many, and all positions are one: then scores tie.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = indexer.index_qk_proj.weight.dtype
    rows, cells = len(starts), max(starts) + n

    def drawn(*shape: int) -> torch.Tensor:
        tokens = torch.randn(alike or shape[0] * shape[1], shape[2], generator=generator).to(dtype)
        if alike is None:
            return tokens.view(shape)
        return tokens[torch.randint(0, alike, shape[:2], generator=generator)]

    hidden = drawn(rows, n, indexer.index_qk_proj.in_features)
    past = drawn(rows, cells, DIM)
    angles = torch.arange(cells)[None, :, None] * torch.rand(DIM // 4, generator=generator)
    angles = torch.cat((angles, angles), dim=-1).expand(rows, -1, -1) * (alike is None)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    offset: torch.Tensor | int = starts[0]
    if n == 1:
        lengths = torch.tensor(starts)
        offset = mark(lengths.view(-1), Decoding.of(0, tuple(starts), cells, torch.device("cpu")))
    mask = lazy_mask(rows, n, cells, offset)
    loop = indexer(hidden, rotary, mask.dense(), Past(past.clone(), starts))
    use_fast_indexers(indexer)
    chosen = indexer(hidden, rotary, mask, Past(past.clone(), starts))
    assert isinstance(chosen, ChosenCells)
    return mask.dense() & loop, chosen.dense(), mask


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("alike", [None, 1, 3], ids=["random", "all tied", "many ties"])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_a_chunk_at_any_place_of_a_block(heads: int, alike: int | None, dtype: torch.dtype) -> None:
    """Pasts from none on, over the length that can be chosen whole (19 cells), and far beyond."""
    for start in (*range(24), 61, 62, 63, 64, 400):
        for n in (2, 5, 33):
            loop, chosen, _ = chosen_by_both(build(heads, dtype), [start], n, start, alike)
            assert torch.equal(loop, chosen), (start, n)


@pytest.mark.parametrize("alike", [None, 1, 3], ids=["random", "all tied", "many ties"])
def test_rows_of_a_step_at_their_own_lengths(alike: int | None) -> None:
    for lengths in ([0, 18, 19, 20], [21, 3, 100, 99], [64, 63, 62, 61], [257]):
        loop, chosen, _ = chosen_by_both(build(), lengths, 1, 0, alike)
        assert torch.equal(loop, chosen), lengths


def test_scores_are_held_in_pieces_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chosen_by_both(build(), [100], 33)
    for scores in (1, 50, 500):
        monkeypatch.setattr(fast, "_SCORES", scores)
        pieces = chosen_by_both(build(), [100], 33)
        assert torch.equal(pieces[0], pieces[1])
        assert torch.equal(pieces[1], whole[1])


@pytest.mark.parametrize("start", [0, 100])
def test_what_is_chosen_takes_the_masks_place_where_anything_is_left_out(start: int) -> None:
    use_fast_indexers(indexer := build())
    mask = lazy_mask(1, 9, start + 9, start)
    rotary = torch.zeros(2, 1, start + 9, DIM // 2)
    past = Past(torch.randn(1, start + 9, DIM), [start])
    chosen = indexer(torch.randn(1, 9, indexer.index_qk_proj.in_features), rotary, mask, past)
    assert (mask & chosen) is (chosen if start else mask)
    assert mask.untouched
    assert chosen.untouched
