"""Attention masks as functions: nothing sized by the context is made unless a model's own code asks for it.

`transformers` describes a mask by a function of (batch, head, query, key) indices and calls a registered
builder with it. Ours returns a `LazyMask`, which carries the function. Attention asks it where a row's
visible cells begin; any tensor operation on it (an indexer that does `mask & selected`) sees the dense mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function

from regrow.gpu.call import Decoding, marked

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_FAN = 32  # cells looked at in one round of the search for a row's first visible cell


class LazyMask(torch.Tensor):
    """A boolean mask [batch, 1, queries, cells] (True: may attend) that is a function until touched."""

    function: MaskFunction
    offset: torch.Tensor | int
    call: Decoding | None
    _dense: torch.Tensor | None
    _starts: dict[int, int | None]

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
        mask._dense = None
        mask._starts = {}
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
        if self.offset != 0 or queries != cells:
            return False
        return self.function is causal_mask_function or (
            self.first_visible(0, cells - 1) == 0 and not self._sees(0, 0, [cells])[0]
        )

    def row_start(self, row: int, length: int) -> int | None:
        """Return a where the token in cell `length` of `row` sees exactly the cells [a, length]; None where
        they are not one run."""
        if row not in self._starts:
            self._starts[row] = self.first_visible(row, length)
        return self._starts[row]

    def first_visible(self, row: int, position: int) -> int | None:
        """Search the first cell that the query at `position` sees, by looking at `_FAN` cells a round."""
        if self.function is causal_mask_function:
            return 0
        low, high = 0, position  # `low` is unseen, unless it is 0; `high` is seen
        while True:
            step = max(1, (high - low) // _FAN)
            cells: list[int] = sorted({*range(low, high, step), high})
            seen = self._sees(row, position, cells)
            first = seen.index(True) if seen[-1] else len(seen)
            if not all(seen[first:]) or not seen[-1]:
                return None
            if first == 0 or step == 1:
                return cells[first]
            low, high = cells[first - 1], cells[first]

    def _sees(self, row: int, position: int, cells: list[int]) -> list[bool]:
        shape = (1, 1, 1, -1)
        at = torch.tensor([row, position, *cells], device=self.device)
        visible = self._evaluate(at[:1].view(shape), at[1:2].view(shape), at[2:].view(shape))
        return [bool(v) for v in visible.expand(1, 1, 1, len(cells)).flatten().tolist()]

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
