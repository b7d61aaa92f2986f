"""V1: a hash of every part of what a slot holds."""

import hashlib

import torch

from regrow.gpu.arena import Arenas
from regrow.gpu.types import Digest


def digest_slot(arenas: Arenas, slot: int, length: int, joined: bool) -> Digest:
    """Hash the cells [0, length) of each layer ("cells.L3.k") and each running state ("state.L0.conv0")."""
    if length == 0:
        return Digest(0, ())
    states = {
        f"state.L{layer}.{kind}{index}": view
        for (layer, kind, index), view in zip(arenas.rest, arenas.states(slot, joined), strict=True)
    }
    cells = {
        f"cells.L{layer}.{name}": view
        for (layer, name), view in zip(arenas.cells, arenas.span(slot, 0, length), strict=True)
    }
    return Digest(length, tuple((name, _hash(part)) for name, part in (states | cells).items()))


def _hash(part: torch.Tensor) -> str:
    data = part.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
