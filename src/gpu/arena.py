"""Slot arenas: every tensor that a session of any slot can need, allocated once.

Cells: one tensor [slots, heads, context + 1, dim] per positional tensor of a layer (one stacked tensor would
be copied whole by compiled code); the last cell is spare, idle rows of a decode step write to it. Running
state twice: rest rows, used for reading, and decode rows, where row i of a step is slot i.
Addressing is by (slot, a, b), so that other layouts can take this one's place.
"""

from math import prod

import numpy as np
import torch

from regrow.errors import ModelRefused
from regrow.gpu.types import CellSpec, Geometry, StateKind, StateSpec

CellKey = tuple[int, str]
StateKey = tuple[int, StateKind, int]
ALIGNED = 64  # bytes, as torch's own tensors are


class Arenas:
    """The arenas of `slots` slots with `context` cells each."""

    def __init__(self, geometry: Geometry, slots: int, context: int, device: torch.device) -> None:
        self.slots, self.context, self.device = slots, context, device
        self.cells: dict[CellKey, torch.Tensor] = {}
        self.rest: dict[StateKey, torch.Tensor] = {}
        self.decode: dict[StateKey, torch.Tensor] = {}
        for cell in geometry.cells:
            self._add_cells(cell)
        for state in geometry.states:
            self._add_state(state)

    def cell_arena(self, key: CellKey, like: torch.Tensor) -> torch.Tensor:
        """Return the arena for cells like `like` [batch, heads, n, dim]."""
        if key not in self.cells:
            raise ModelRefused(f"layer {key[0]} keeps cells {key[1]!r} that probing did not find")
        return self.cells[key]

    def ensure_state(self, key: StateKey, like: torch.Tensor, size: int | None = None) -> None:
        """Make sure that there are arenas for a state like `like` [batch, ...], its last dimension `size`."""
        if key not in self.rest:
            raise ModelRefused(f"layer {key[0]} keeps {key[1]} state {key[2]} that probing did not find")

    def span(self, slot: int, a: int, b: int) -> list[torch.Tensor]:
        """Return views [heads, b - a, dim] of the cells [a, b) of `slot`, in the order of the geometry."""
        return [arena[slot, :, a:b] for arena in self.cells.values()]

    def states(self, slot: int, joined: bool = False) -> list[torch.Tensor]:
        """Return views of the running state of `slot`, in the order of the geometry."""
        return [arena[slot] for arena in (self.decode if joined else self.rest).values()]

    def join(self, slot: int) -> None:
        """Copy the running state of `slot` from its rest row to its decode row."""
        for decode, rest in zip(self.decode.values(), self.rest.values(), strict=True):
            decode[slot].copy_(rest[slot])

    def leave(self, slot: int) -> None:
        """Copy the running state back to the rest row; the decode row, now idle, starts from zero."""
        for decode, rest in zip(self.decode.values(), self.rest.values(), strict=True):
            rest[slot].copy_(decode[slot])
            decode[slot].zero_()

    def _add_cells(self, spec: CellSpec) -> None:
        shape = (self.slots, spec.heads, self.context + 1, spec.dim)
        self.cells[spec.layer, spec.name] = self._zeros(shape, spec.dtype)

    def _add_state(self, spec: StateSpec) -> None:
        key = (spec.layer, spec.kind, spec.index)
        self.rest[key] = self._zeros((self.slots, *spec.shape), spec.dtype)
        self.decode[key] = self._zeros((self.slots, *spec.shape), spec.dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # an inference tensor could not be written by a copy thread
            if self.device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=self.device)
            # the system's zeros, which take memory only once they are written to
            size = prod(shape) * dtype.itemsize
            blank = np.zeros(size + ALIGNED, np.uint8)
            start = -blank.ctypes.data % ALIGNED
            return torch.from_numpy(blank[start : start + size]).view(dtype).view(shape)
