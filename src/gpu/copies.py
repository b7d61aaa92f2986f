"""Copies of cells in pieces: one piece is one tensor of one layer, copied between two steps.

On a CPU the cores are taken by computing, so a copy is paid for in small change between the steps. A lane of
its own (a CUDA stream) takes this one's place behind the same protocol.
"""

import time
from collections import deque
from collections.abc import Iterable

import torch


class PieceCopy:
    """Copies (target, source) pairs of views of equal shape, in order."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = deque(pairs)

    def advance(self, seconds: float) -> bool:
        """Copy for about `seconds`, at least one piece; True once everything is copied."""
        end = time.perf_counter() + seconds
        while self._pairs:
            target, source = self._pairs.popleft()
            target.copy_(source)
            if time.perf_counter() >= end:
                break
        return not self._pairs
