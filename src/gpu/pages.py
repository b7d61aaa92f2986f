"""Memory that is given by the system when it is first written to, page by page, each with a trap of its own:
asked for at once it costs a fraction of that."""

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache

import torch

PIECE_BYTES = 2 * 1024 * 1024  # asked for at a time, where somebody may come
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    library = ctypes.CDLL(None)
    if not hasattr(library, "madvise"):
        return None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library.madvise


def give_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Have the system give the memory under tensors [heads, cells, dim] on the CPU, contiguous within a head,
    before they are written to. Their contents stay; a system that cannot leaves it as it is."""
    madvise = _madvise()
    if madvise is None:
        return
    for tensor in tensors:
        size, stride = tensor[:1].nbytes, tensor.stride(0) * tensor.element_size()
        for head in range(len(tensor) if size else 0):
            start = tensor.data_ptr() + head * stride
            first = start - start % mmap.PAGESIZE
            madvise(first, start + size - first, _POPULATE_WRITE)


class SlotMemory:
    """How many cells of each slot have memory. cell_bytes: of a cell of all layers."""

    def __init__(self, slots: int, cell_bytes: int) -> None:
        self._cells = [0] * slots
        self._piece = max(1, PIECE_BYTES // max(cell_bytes, 1))

    def reaches(self, slot: int) -> int:
        """Return below which cell a slot has memory."""
        return self._cells[slot]

    def given(self, slot: int, stop: int) -> None:
        """Note that a slot has memory for its cells below `stop`."""
        self._cells[slot] = max(self._cells[slot], stop)

    def wanted(self, used: int) -> tuple[int, int, int] | None:
        """Return the next cells (slot, start, stop) that should get memory while nothing else is to be done,
        so that one slot more than are `used` has as much as the one with most; None where they have."""
        most = max(self._cells)
        ranked = sorted(range(len(self._cells)), key=lambda slot: -self._cells[slot])
        for slot in ranked[: used + 1]:
            start = self._cells[slot]
            if start < most:
                return slot, start, min(start + self._piece, most)
        return None
