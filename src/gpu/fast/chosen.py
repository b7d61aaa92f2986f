"""Attention over the cells that an indexer chose for each query.

An indexer hands its choice to the model's own code as a mask that is dense only when something touches it;
attention takes the choice out of it again. A row of a decode step gathers the chosen blocks, as many whatever
its length. A chunk goes in tiles of queries, each with a mask of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from regrow.gpu.lazy_mask import LazyMask

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], torch.Tensor]

_AND = (torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.__and__.Tensor)
_TILE = 64  # queries


@dataclass(frozen=True, slots=True)
class Choice:
    """What the queries of one row may attend to, the first of them in cell `start`.

    Up to query `first` every cell up to its own. From there on the chosen blocks of `size` cells, ascending
    [queries - first, most], and the cells after the last whole block.
    """

    start: int
    first: int
    size: int
    blocks: torch.Tensor

    def mask(self, a: int, b: int) -> torch.Tensor:
        """Return the mask [b - a, cells] of the queries [a, b), a not below `first`, for the cells that the
        last of them sees."""
        cells, device = self.start + b, self.blocks.device
        own = torch.arange(self.start + a, cells, device=device)[:, None]
        chosen = torch.zeros(b - a, cells // self.size + 1, dtype=torch.bool, device=device)
        chosen.scatter_(1, self.blocks[a - self.first : b - self.first], True)
        chosen.scatter_(1, (own + 1) // self.size, True)  # the cells after the last whole block
        each = chosen.repeat_interleave(self.size, dim=1)[:, :cells]
        return each & (torch.arange(cells, device=device) <= own)


class ChosenCells(LazyMask):
    """A mask [batch, 1, n, cells] of the cells that were chosen among those that `visible` shows.

    rows: a choice for each row; None: all that is visible.
    """

    visible: LazyMask
    rows: Sequence[Choice | None]

    @classmethod
    def of(cls, visible: LazyMask, rows: Sequence[Choice | None]) -> "ChosenCells":
        batch, _, n, cells = visible.shape
        mask = cls(visible.function, (batch, 1, n, cells), visible.offset, visible.device)
        mask.visible, mask.rows = visible, rows
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _AND:
            chosen = next(arg for arg in args if isinstance(arg, ChosenCells))
            if any(arg is chosen.visible for arg in args):
                return chosen if any(chosen.rows) else chosen.visible
        return super().__torch_dispatch__(func, types, args, dict(kwargs or {}))

    def dense(self) -> torch.Tensor:
        if self._dense is None:
            self._dense = self.visible.dense().clone()
            for row, choice in zip(self._dense[:, 0], self.rows, strict=True):
                if choice is not None:
                    mask = choice.mask(choice.first, len(row))
                    row[choice.first :, : mask.shape[1]] &= mask
        return self._dense


def attend_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: ChosenCells,
    scale: float | None,
    attend_chunk: Attend,
    attend_row: Attend,
) -> torch.Tensor:
    """Queries [b, heads, n, dim] over keys [b, kv_heads, cells, dim]; returns [b, heads, n, value_dim].

    attend_chunk, attend_row: attention where nothing was left out.
    """
    if mask.call is None:
        return _chunk(query, key, value, mask, scale, attend_chunk)
    out = query.new_zeros(*query.shape[:3], value.shape[3])  # idle rows stay zero
    for i, (length, choice) in enumerate(zip(mask.call.lengths, mask.rows, strict=True)):
        if length is None:
            continue
        own = key[i : i + 1, :, : length + 1], value[i : i + 1, :, : length + 1]
        if choice is not None:
            own = _gathered(own[0], choice), _gathered(own[1], choice)
        out[i] = attend_row(query[i : i + 1], *own, None, scale)[0]
    return out


def _gathered(cells: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return those of `cells` [1, heads, cells, dim] that the only query chose: as many at any length."""
    _, heads, count, dim = cells.shape
    whole = count // choice.size
    blocks = cells[0, :, : whole * choice.size].view(heads, whole, choice.size * dim)
    chosen = blocks.index_select(1, choice.blocks[0]).view(1, heads, -1, dim)
    return torch.cat((chosen, cells[:, :, whole * choice.size :]), dim=2)


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: ChosenCells,
    scale: float | None,
    attend_chunk: Attend,
) -> torch.Tensor:
    [choice] = mask.rows
    visible, n = mask.visible, query.shape[2]
    assert choice is not None  # or nothing would have been left out of what is visible
    parts = []
    if choice.first:
        end = choice.start + choice.first
        before = LazyMask(visible.function, (1, 1, choice.first, end), visible.offset, visible.device)
        parts.append(
            attend_chunk(query[:, :, : choice.first], key[:, :, :end], value[:, :, :end], before, scale)
        )
    for a in range(choice.first, n, _TILE):
        b = min(n, a + _TILE)
        end = choice.start + b
        parts.append(_tile(query[:, :, a:b], key[:, :, :end], value[:, :, :end], choice.mask(a, b), scale))
    return torch.cat(parts, dim=2)


def _tile(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """As `attend_chosen`, batch 1, with a mask [n, cells]; the heads that share a key head take its keys as
    they lie, repeated by a stride of nothing."""
    _, heads, n, _ = query.shape
    kv_heads = key.shape[1]
    each = (-1, heads // kv_heads, -1, -1)
    out = scaled_dot_product_attention(
        query.reshape(kv_heads, heads // kv_heads, n, -1),
        key[0, :, None].expand(each),
        value[0, :, None].expand(each),
        mask[None, None],
        scale=scale,
    )
    return out.reshape(1, heads, n, -1)
