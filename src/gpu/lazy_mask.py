"""Attention masks as functions: nothing sized by the context is made unless a model's own code asks for it.

`transformers` describes a mask by a function of (batch, head, query, key) indices and calls a registered
builder with it. Ours returns a `LazyMask`, which carries the function. Attention asks it where the cells that
a query sees begin; any tensor operation on it (an indexer that does `mask & selected`) sees the dense mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function

from regrow.gpu.call import Decoding, marked

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_FAN = 32  # cells looked at in one round of the search for a query's first visible cell
_NO_RUN = -1


class LazyMask(torch.Tensor):
    """A boolean mask [batch, 1, queries, cells] (True: may attend) that is a function until touched."""

    function: MaskFunction
    offset: torch.Tensor | int
    call: Decoding | None
    _dense: torch.Tensor | None
    _chunk_runs: torch.Tensor | None
    _are_runs: bool
    _row_starts: list[int | None] | None
    _row_runs: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["LazyMask"],
        function: MaskFunction,
        shape: tuple[int, int, int, int],
        offset: torch.Tensor | int,
        device: torch.device,
    ) -> "LazyMask":
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.function = function
        mask.offset = offset
        mask.call = marked(offset)
        mask._dense = mask._chunk_runs = mask._row_starts = mask._row_runs = None
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def touch(value: Any) -> Any:
            return value.dense() if isinstance(value, LazyMask) else value

        return func(*tree_map(touch, args), **tree_map(touch, kwargs or {}))

    def dense(self) -> torch.Tensor:
        """Return the mask as a boolean tensor; made at the first call."""
        if self._dense is None:
            batch, _, queries, cells = self.shape
            offset = self.offset
            q = torch.arange(queries, device=self.device)[None, None, :, None]
            q = q + (offset[:, None, None, None] if isinstance(offset, torch.Tensor) else offset)
            visible = self._evaluate(
                torch.arange(batch, device=self.device)[:, None, None, None],
                q,
                torch.arange(cells, device=self.device)[None, None, None, :],
            )
            self._dense = visible.expand(batch, -1, queries, cells)
        return self._dense

    @property
    def untouched(self) -> bool:
        """Whether no dense mask was made."""
        return self._dense is None

    def is_plain_causal(self) -> bool:
        """Whether query i of a fresh chunk sees exactly the cells [0, i]."""
        queries, cells = self.shape[2:]
        runs = self.chunk_runs() if self.offset == 0 and queries == cells else None
        return runs is not None and not runs[0].any()

    def chunk_runs(self) -> torch.Tensor | None:
        """Return int32 [2, batch, queries] on the CPU, first and end of the cells that each query of a chunk
        sees; None where the cells of some query are not one run that ends with its own."""
        if self._chunk_runs is None:
            batch, _, queries, cells = self.shape
            position = self.offset + torch.arange(queries, device=self.device).expand(batch, queries)
            first = torch.zeros_like(position)
            if self.function is not causal_mask_function:
                rows = torch.arange(batch, device=self.device)[:, None].expand(batch, queries)
                first = self._first_seen(rows, position)
                behind = torch.stack([position + 1, torch.full_like(position, cells)], dim=-1).clamp(
                    max=cells - 1
                )
                seen = self._sees(rows, position, behind) & (behind > position[..., None])
                first = first.masked_fill(seen.any(-1), _NO_RUN)
            self._chunk_runs = torch.stack([first, position + 1]).int().cpu()
            self._are_runs = not bool((first == _NO_RUN).any())
        return self._chunk_runs if self._are_runs else None

    def row_starts(self, lengths: tuple[int | None, ...]) -> list[int | None]:
        """Return for each row of a step an a where its token, in cell `length`, sees exactly the cells
        [a, length]; None where they are not one run, and for an idle row."""
        if self._row_starts is None:
            first = [0] * len(lengths)
            if self.function is not causal_mask_function:
                position = torch.tensor([[n or 0] for n in lengths], device=self.device)
                rows = torch.arange(len(lengths), device=self.device)[:, None]
                first = self._first_seen(rows, position)[:, 0].tolist()
            self._row_starts = [
                None if length is None or a == _NO_RUN else a
                for a, length in zip(first, lengths, strict=True)
            ]
        return self._row_starts

    def row_runs(self, lengths: tuple[int | None, ...]) -> torch.Tensor:
        """Return int32 [2, rows, 1] on the CPU: each row's first cell and the end of its cells, 0 and 0 where
        `row_starts` has None."""
        if self._row_runs is None:
            runs = [
                (a, n + 1) if a is not None and n is not None else (0, 0)
                for a, n in zip(self.row_starts(lengths), lengths, strict=True)
            ]
            self._row_runs = torch.tensor(runs, dtype=torch.int32).T.contiguous()[..., None]
        return self._row_runs

    def _first_seen(self, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Search the first cell that the query at `position` of each row sees, all int64 [batch, queries], by
        looking at `_FAN` cells a round; `_NO_RUN` where not all cells from there to its own are seen."""
        low, high = torch.zeros_like(position), position  # `low` is unseen, unless it is the first one
        one_run = torch.ones_like(position, dtype=torch.bool)
        fan = torch.arange(_FAN + 1, device=self.device)
        while True:
            cells = low[..., None] + (high - low)[..., None] * fan // _FAN
            seen = self._sees(rows, position, cells)
            one_run = one_run & seen[..., -1] & (seen[..., 1:] >= seen[..., :-1]).all(-1)
            at = seen.int().argmax(-1, keepdim=True)
            high = cells.gather(-1, at)[..., 0]
            low = cells.gather(-1, (at - 1).clamp(min=0))[..., 0]
            if bool((high - low <= 1).all()):
                return high.masked_fill(~one_run, _NO_RUN)

    def _sees(self, rows: torch.Tensor, position: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """Whether queries [batch, queries] see `cells` [batch, queries, k]."""
        visible = self._evaluate(rows[:, None, :, None], position[:, None, :, None], cells[:, None])
        return visible.expand(-1, 1, *cells.shape[1:])[:, 0]

    def _evaluate(self, batch: torch.Tensor, query: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return self.function(batch, torch.zeros_like(batch[:1]), query, cell)


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: torch.Tensor | int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> LazyMask:
    """The mask builder registered with `transformers`. There is no padding here: each row has its length."""
    if attention_mask is not None or kv_offset:
        raise NotImplementedError("padding masks and cell offsets are not used with slot arenas")
    return LazyMask(mask_function, (batch_size, 1, q_length, kv_length), q_offset, torch.device(device))
