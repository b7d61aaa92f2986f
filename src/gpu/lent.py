"""Cells that a slot counts as its own while they still lie in another slot, or in host memory.

The next chunk of the slot puts them where they belong, layer by layer: a native layer reads them where they
lie and passes them on in the same go (`fast/layer.py`), so that nobody waits for a copy; any other layer gets
them before it is entered. Whatever else touches them, at either end, has them copied first (`runner.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regrow.gpu.arena import Arenas
from regrow.gpu.fast.copying import copy_cells
from regrow.gpu.kernels.spans import Pair
from regrow.gpu.types import HostCells


@dataclass(frozen=True, slots=True)
class LentLayer:
    """The cells [start, stop) of one layer: keys and values [heads, stop - start, dim] where they lie."""

    start: int
    stop: int
    keys: torch.Tensor
    values: torch.Tensor


class LentCells:
    """Cells of `parts`, contiguous from 0, that belong into `slot`; lender: the slot they lie in, if any."""

    def __init__(self, arenas: Arenas, slot: int, parts: Sequence[HostCells], lender: int | None) -> None:
        self.lender = lender
        self.stop = parts[-1].stop
        self._slot, self._parts = slot, parts
        self._left: dict[int, dict[str, tuple[torch.Tensor, int]]] = {}  # layer -> name -> arena, its index
        for index, ((layer, name), arena) in enumerate(arenas.cells.items()):
            self._left.setdefault(layer, {})[name] = arena, index

    def take(self, layer: int) -> LentLayer | None:
        """Return the longest part of the keys and values of `layer`, which the caller puts where it belongs;
        copy the others. None where nothing is left of the layer."""
        names = self._left.pop(layer, None)
        if names is None:
            return None
        longest = max(self._parts, key=lambda part: part.stop - part.start)
        for arena, index in names.values():
            copy_cells(self._pairs(arena, index, [part for part in self._parts if part is not longest]))
        keys, values = (longest.tensors[names[name][1]] for name in ("k", "v"))
        return LentLayer(longest.start, longest.stop, keys, values)

    def settle(self, layer: int) -> None:
        """Copy what is left of `layer`."""
        for arena, index in self._left.pop(layer, {}).values():
            copy_cells(self._pairs(arena, index, self._parts))

    def advance(self) -> bool:
        """Copy what is left of one layer; False where nothing was."""
        for layer in self._left:
            self.settle(layer)
            return True
        return False

    def _pairs(self, arena: torch.Tensor, index: int, parts: Sequence[HostCells]) -> list[Pair]:
        return [(arena[self._slot, :, part.start : part.stop], part.tensors[index]) for part in parts]
