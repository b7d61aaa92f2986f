"""Asking for pages changes nothing but when the system gives them."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from regrow.gpu import pages
from regrow.gpu.pages import PIECE_BYTES, SlotMemory, give_pages
from tests.gpu.drive import fresh_runner, plan_of, prompt, read


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


def test_one_slot_more_than_are_used_gets_the_memory_of_the_longest_piece_by_piece() -> None:
    memory = SlotMemory(4, PIECE_BYTES // 100)
    assert memory.wanted(0) is None
    memory.given(2, 250)
    seen = []
    while wanted := memory.wanted(1):
        seen.append(wanted)
        memory.given(wanted[0], wanted[2])
    assert seen == [(0, 0, 100), (0, 100, 200), (0, 200, 250)]
    assert memory.wanted(2) == (1, 0, 100)
    assert memory.wanted(9) == (1, 0, 100)
    assert [memory.reaches(slot) for slot in range(4)] == [250, 0, 250, 0]


def test_a_device_with_nothing_to_do_asks_for_the_memory_of_the_next_slot() -> None:
    runner = fresh_runner("qwen3_5")
    read(runner, 1, prompt(150), plan_of(150))
    before = [tensor.clone() for tensor in (*runner.arenas.cells.values(), *runner.arenas.rest.values())]
    while runner.foresee():
        pass
    assert [runner._memory.reaches(slot) for slot in range(runner.slots)] == [149, 149, 0, 0]
    after = [*runner.arenas.cells.values(), *runner.arenas.rest.values()]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
