"""Cells and states as tensors of a record and back (S5), and the order in which the disk actor has them
written and removed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
import torch

from regrow.actors.disk import DiskActor
from regrow.actors.disk_loop import DiskLoop
from regrow.actors.disk_messages import DiskChanged, LiveRecords, PurgeRecords, RecordsWritten, WriteRecords
from regrow.actors.on_disk import DTYPES, ToSave, cell_tensors, cells_of, snapshot_of, state_tensors
from regrow.actors.threads import Threads
from regrow.gpu.types import CellSpec, Geometry, HostCells, Snapshot, StateSpec
from regrow.policy.directory import Holder, HolderId
from regrow.store.record import Broken, Tensor
from regrow.store.records import Records
from tests.actors.kept import ROOT, SPACE, Talk, copy_of, slot
from tests.store.disk import SimulatedDisk

PART = (3, 8, b"prefix")
CHAT = Talk(0, (1, 2))


def geometry(dtype: torch.dtype) -> Geometry:
    return Geometry(
        cells=(CellSpec(0, "k", 2, 4, dtype), CellSpec(0, "v", 2, 3, torch.float32)),
        states=(StateSpec(1, "conv", 0, (4, 3), dtype), StateSpec(1, "recurrent", 0, (), torch.float32)),
    )


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) % 100).to(dtype)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_is_stored_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    shape = geometry(dtype)
    cells = HostCells(3, 8, (some(dtype, 2, 5, 4), some(torch.float32, 2, 5, 3)))
    back = cells_of(PART, cell_tensors(cells, shape), shape)
    assert (back.start, back.stop) == (3, 8)
    snapshot = Snapshot(8, (some(dtype, 4, 3), torch.tensor(0.5)))
    again = snapshot_of(8, state_tensors(snapshot, shape), shape)
    assert again.position == 8
    for one, other in zip((*cells.tensors, *snapshot.states), (*back.tensors, *again.states), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_tensors_that_are_not_those_of_the_model_are_broken() -> None:
    shape = geometry(torch.bfloat16)
    good = cell_tensors(HostCells(3, 8, (some(torch.bfloat16, 2, 5, 4), some(torch.float32, 2, 5, 3))), shape)
    wrong: list[tuple[list[Tensor], str]] = [
        (good[:1], "not those of this model"),
        ([good[0], replace(good[1], name="L9.v")], "not those of this model"),
        ([good[0], replace(good[1], dtype="F16")], r"L0\.v: its shape or dtype"),
        ([replace(good[0], shape=(2, 4, 5)), good[1]], r"L0\.k: its shape or dtype"),
    ]
    for tensors, reason in wrong:
        with pytest.raises(Broken, match=reason):
            cells_of(PART, tensors, shape)


class Here:
    """Threads in which nothing takes its time."""

    def deliver(self, callback: Callable[[], None]) -> None:
        callback()


async def test_a_purge_leaves_nothing_of_a_save_that_was_asked_for_before_it() -> None:
    shape = Geometry(cells=(CellSpec(0, "k", 1, 4, torch.uint8),), states=())
    disk, told = SimulatedDisk(), list[tuple[str, object]]()
    records = Records(disk, "this model", 1 << 20, 0)
    loop = DiskLoop(records, {}, lambda: 0.0, lambda live: told.append(("disk", LiveRecords(live))))
    threads, size = cast(Threads, Here()), 1 << 20
    actor = DiskActor(
        loop, "somewhere", size, size, shape, threads, lambda *message: told.append(message), lambda: 0.0
    )

    def saved(kind: str, talk: Talk) -> ToSave:
        edges = [0, ROOT, talk.length] if talk.turns else [0, ROOT]
        spans = tuple((a, b, talk.prefix(b)) for a, b in pairwise(edges))
        holder = Holder(slot(0), talk.length, talk.cuts, talk.length)
        cells = {span: copy_of(talk, *span[:2]) for span in spans}
        return ToSave("root" if kind == "root" else "chat", holder, SPACE, talk.keys, spans, (), cells, {})

    name = HolderId("disk", 1)
    await actor.started()
    await actor.handle(WriteRecords(name, (saved("root", Talk(0)), saved("chat", CHAT))))
    await actor.handle(PurgeRecords(frozenset({CHAT.prefix(ROOT)})))
    while loop.step():
        pass
    assert disk.names == {}
    assert ("cache", RecordsWritten(name, well=True)) in told
    for to, message in list(told):
        if to == "disk":
            await actor.handle(message)
            actor.check_integrity()
    changes = [message for to, message in told if to == "cache" and isinstance(message, DiskChanged)]
    assert sum(len(change.added) for change in changes) == sum(len(change.gone) for change in changes) == 2
    with pytest.raises(TypeError, match="does not know"):
        await actor.handle("what?")
