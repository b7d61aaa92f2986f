"""How copies are made on a device: mount (device to device), park (to the host), restore (from it), snapshot.

Whoever has begun a copy keeps what it reads from unchanged, and what it writes to unused, until it has ended
(`transfers.py`). Steps that were given to the device before are finished first; steps after it do not wait.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from regrow.gpu.copies import PieceLanes
from regrow.gpu.kernels.spans import Pair
from regrow.gpu.stream_lanes import StreamLanes, cuda_workers
from regrow.gpu.streams import CudaStreams
from regrow.gpu.types import CellCopy, StateCopy


class Lanes(Protocol):
    """Pairs are (target, source) of equal shape [heads, cells, dim] and dtype. held: bytes of host memory
    that the lanes keep for themselves. anew: the targets' memory may never have been used."""

    held: int

    def mount(self, pairs: Iterable[Pair], *, anew: bool) -> CellCopy:
        """Begin to copy on the device."""
        ...

    def restore(self, pairs: Iterable[Pair], *, anew: bool) -> CellCopy:
        """Begin to copy from host memory to the device."""
        ...

    def park(self, cells: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], CellCopy]:
        """Begin to copy to host memory of its own; it is filled once the copy has ended."""
        ...

    def snapshot(self, position: int, states: Sequence[torch.Tensor]) -> StateCopy:
        """Begin to copy contiguous states as they are now: they may be changed at once."""
        ...


def lanes_for(device: torch.device) -> Lanes:
    """Return the way to copy on `device`."""
    if device.type != "cuda":
        return PieceLanes()
    return StreamLanes(CudaStreams(device), cuda_workers())
