"""Copies in pieces: what a machine has that computes and copies with the same cores.

One piece is some cells of one tensor, and a batch some pieces, small enough for the gap between two steps;
the device loop pays for them in small change. A device with streams copies beside its steps
(`stream_lanes.py`), behind the same protocol (`Lanes`).
"""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from regrow.gpu.fast.copying import copy_cells
from regrow.gpu.kernels.spans import Pair
from regrow.gpu.pages import PIECE_BYTES, give_pages
from regrow.gpu.types import Snapshot

SMALL = 64 * 1024  # bytes, whose pages are not asked for
TURN_S = 0.05  # of a machine with nothing else to do, until it looks for something


def pieces(pairs: Iterable[Pair], limit: int) -> Iterator[Pair]:
    """Cut each (target, source) [heads, cells, dim] by cells into pieces of at most `limit` bytes, at least a
    cell."""
    for target, source in pairs:
        if target.nbytes <= limit:
            yield target, source
            continue
        step = max(1, limit // max(target[:, :1].nbytes, 1))
        for at in range(0, target.shape[1], step):
            yield target[:, at : at + step], source[:, at : at + step]


def batches(pieces: Iterable[Pair], limit: int) -> Iterator[list[Pair]]:
    """Put pieces that follow each other together while they are at most `limit` bytes."""
    batch: list[Pair] = []
    size = 0
    for piece in pieces:
        if batch and size + piece[0].nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[0].nbytes
    if batch:
        yield batch


def as_cells(states: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return views [1, n, 1] of contiguous tensors, to be copied as cells are."""
    return [state.view(1, -1, 1) for state in states]


def finite(states: Iterable[torch.Tensor]) -> bool:
    return all(bool(state.isfinite().all()) for state in states if state.is_floating_point())


def host_like(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return room in host memory for a copy of each."""
    with torch.inference_mode(False):  # an inference tensor could not be written by a copy thread
        return tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors)


class PieceCopy:
    """Copies (target, source) pairs of views [heads, cells, dim] of equal shape, in order. anew: the targets'
    memory may never have been used."""

    def __init__(self, pairs: Iterable[Pair], *, anew: bool) -> None:
        self._anew = anew
        self._batches = batches(pieces(pairs, PIECE_BYTES), PIECE_BYTES)
        self._next = next(self._batches, None)

    @property
    def ended(self) -> bool:
        return self._next is None

    def advance(self, seconds: float) -> bool:
        end = time.perf_counter() + min(seconds, TURN_S)
        while self._next is not None:
            if self._anew:
                give_pages(target for target, _ in self._next if target.nbytes > SMALL)
            copy_cells(self._next)
            self._next = next(self._batches, None)
            if time.perf_counter() >= end:
                break
        return self.ended


class Ended:
    """A copy of which nothing is left to do."""

    ended = True

    def advance(self, seconds: float) -> bool:
        return True


class Taken(Ended):
    """A state that is copied at once, since what follows would change it."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.snapshot = snapshot


class PieceLanes:
    """Copies between the steps; implements `Lanes`."""

    held = 0

    def mount(self, pairs: Iterable[Pair], *, anew: bool) -> PieceCopy:
        return PieceCopy(pairs, anew=anew)

    def restore(self, pairs: Iterable[Pair], *, anew: bool) -> PieceCopy:
        return PieceCopy(pairs, anew=anew)

    def park(self, cells: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], PieceCopy]:
        host = host_like(cells)
        return host, PieceCopy(zip(host, cells, strict=True), anew=True)

    def snapshot(self, position: int, states: Sequence[torch.Tensor]) -> Taken:
        copies = tuple(state.clone() for state in states)
        return Taken(Snapshot(position, copies) if finite(copies) else None)
