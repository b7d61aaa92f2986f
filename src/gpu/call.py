"""What one forward pass does: read a chunk of one slot, or feed one token to each of several rows.

The pass travels with the tensors it concerns, as an attribute of the keys that `SlotCache.update` returns and
of the query offset that the model hands to the mask function; there is no "current call" anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from regrow.gpu.lent import LentCells

_CALL = "_regrow_call"


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens for cells [start, start + n) of `slot`, batch 1, on its rest row.

    between: called when the pass comes to the next layer, before anything of that layer is touched; passes
    over another `SlotCache` may run in it. lent: cells before `start` that are not in the slot yet.
    """

    slot: int
    start: int
    n: int
    between: Callable[[], None] | None = field(default=None, compare=False)
    lent: LentCells | None = field(default=None, compare=False)

    @property
    def end(self) -> int:
        return self.start + self.n


@dataclass(slots=True)
class Decoding:
    """One token a row; row i of the batch is slot `first + i`, on its decode row.

    lengths: the cell its token goes into, None for an idle row. slots, cells: int64 [rows], the same for
    indexing (an idle row writes to the spare cell). positions: int64 [rows], 0 for an idle row. The counters
    tell what became of the cells: how often the model stored some, attended over exactly what it got back
    (`intact`), or over something else (`changed`).
    """

    first: int
    lengths: tuple[int | None, ...]
    slots: torch.Tensor
    cells: torch.Tensor
    positions: torch.Tensor
    updates: int = 0
    intact: int = 0
    changed: int = 0

    @classmethod
    def of(cls, first: int, lengths: tuple[int | None, ...], spare: int, device: torch.device) -> "Decoding":
        return cls(
            first,
            lengths,
            torch.arange(first, first + len(lengths), device=device),
            torch.tensor([spare if n is None else n for n in lengths], device=device),
            torch.tensor([n or 0 for n in lengths], device=device),
        )

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.lengths))

    @property
    def end(self) -> int:
        """Cells that the longest row sees."""
        return max(n for n in self.lengths if n is not None) + 1


Call = Reading | Decoding


def mark(tensor: torch.Tensor, call: Decoding) -> torch.Tensor:
    """Let `tensor` (a new view, never an arena) say which call it belongs to; return it."""
    setattr(tensor, _CALL, call)
    return tensor


def marked(tensor: object) -> Decoding | None:
    """Return the call that `tensor` was marked with; None after any operation on it."""
    call = getattr(tensor, _CALL, None)
    return call if isinstance(call, Decoding) else None
