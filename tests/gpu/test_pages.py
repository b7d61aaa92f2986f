"""Asking for pages changes nothing but when the system gives them."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from regrow.gpu import pages
from regrow.gpu.pages import give_pages


def given(buffer: np.ndarray) -> int:
    """Return how many pages of a buffer the system has given memory for."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(buffer.ctypes.data // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(buffer.nbytes // mmap.PAGESIZE * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_the_pages_under_a_part_of_each_head_are_there_and_those_of_others_are_not() -> None:
    heads, cells, dim = 3, 1024, 64
    buffer = np.frombuffer(mmap.mmap(-1, heads * cells * dim * 4), np.uint8)
    arena = torch.from_numpy(buffer).view(torch.float32).view(heads, cells, dim)
    give_pages([arena[:, 100:356]])
    if not given(buffer):
        pytest.skip("this system does not give pages that are asked for")
    per_head = 256 * dim * 4 // mmap.PAGESIZE
    assert heads * per_head <= given(buffer) <= heads * (per_head + 2)
    assert not arena.any()


def test_what_is_there_already_keeps_its_contents() -> None:
    arena = torch.arange(4 * 300 * 32, dtype=torch.float32).view(4, 300, 32)
    before = arena.clone()
    give_pages([arena[:, 7:], arena[1:3, :1], arena[:, :0]])
    assert torch.equal(arena, before)


def test_a_system_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    give_pages([torch.zeros(2, 3, 4)])
