"""How `copy_spans.cu` is launched: which runs of bytes a list of tensor copies comes to, and the grid.

Pure: the same table is given to the GPU and, in the tests, to the kernel compiled for the CPU.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("copy_spans.cu")
NAME = "copy_spans"
TILE_BYTES = 16 * 1024
BLOCK = 256  # threads
MAX_GRID = (
    64  # blocks: enough to fill a bus, and what is computed beside the copy keeps most of the processors
)

Pair = tuple[torch.Tensor, torch.Tensor]
_Run = tuple[int, int, int, int, int, int]  # from, to, their strides, bytes of a run, runs


@dataclass(frozen=True, slots=True)
class Launch:
    """table: int64 [parts, 6], the kernel's `Part`s, on the CPU. Without tiles there is nothing to launch."""

    table: torch.Tensor
    tiles: int

    @property
    def grid(self) -> int:
        return min(self.tiles, MAX_GRID)

    @property
    def scalars(self) -> tuple[int, int, int]:
        """The kernel's arguments after the table."""
        return len(self.table), self.tiles, TILE_BYTES


def launch_of(pairs: Iterable[Pair]) -> Launch:
    """Return how all (target, source) are copied in one launch. Raises ValueError where two differ in shape
    or dtype."""
    runs = [run for target, source in pairs for run in _runs(target, source)]
    tiles = [count * -(-size // TILE_BYTES) for *_, size, count in runs]
    firsts = [0, *accumulate(tiles)]
    table = [(*part, size, first) for (*part, size, _), first in zip(runs, firsts, strict=False)]
    return Launch(torch.tensor(table, dtype=torch.int64).view(-1, 6), firsts[-1])


def _runs(target: torch.Tensor, source: torch.Tensor) -> Iterator[_Run]:
    """Yield the runs that a copy comes to: of the whole tensor, of its rows, or of each row's own."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"{source.dtype} {[*source.shape]} is not {target.dtype} {[*target.shape]}")
    if not target.numel():
        return
    size, ends = target.itemsize, (source.data_ptr(), target.data_ptr())
    if target.is_contiguous() and source.is_contiguous():
        yield *ends, 0, 0, target.nbytes, 1
    elif target[0].is_contiguous() and source[0].is_contiguous():
        strides = source.stride(0) * size, target.stride(0) * size
        yield *ends, *strides, target[0].nbytes, len(target)
    else:
        for row_target, row_source in zip(target, source, strict=True):
            yield from _runs(row_target, row_source)
