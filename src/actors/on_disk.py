"""What the actors say to each other of records, and cells and running states as their tensors and back.

Going back every name, dtype and shape is held against the model's geometry before anything is touched (S5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from regrow.actors.shelf import Kept
from regrow.gpu.types import CellSpec, Geometry, HostCells, Snapshot, StateSpec
from regrow.policy.directory import CutHash, Holder, HolderId
from regrow.policy.keys import Keys, Namespace
from regrow.store.files import Bytes
from regrow.store.record import Broken, RecordKind, Tensor, unpacked
from regrow.store.records import NewRecord, PartKey, Stored

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A record that can be used: its holder, keys, the spans (start, stop, prefix) it consists of, contiguous
    from 0, and the (position, prefix) of its running states."""

    kind: RecordKind
    holder: Holder
    namespace: Namespace
    keys: Keys
    spans: tuple[PartKey, ...]
    states: tuple[CutHash, ...]

    @classmethod
    def of(cls, stored: Stored, used: int) -> "OnDisk":
        header = stored.header
        return cls(
            kind=header.kind,
            holder=Holder(
                HolderId("disk", stored.name),
                header.length,
                header.cuts,
                header.pure_length,
                header.last_start,
                used,
                states=frozenset(part.prefix for part in header.states),
            ),
            namespace=Namespace(header.namespace),
            keys=unpacked(header.keys),
            spans=tuple((part.start, part.stop, part.prefix) for part in header.spans),
            states=tuple((part.stop, part.prefix) for part in header.states),
        )

    @property
    def name(self) -> str:
        return str(self.holder.id.key)

    @property
    def told(self) -> Kept:
        """What the engine is told of it."""
        return Kept(self.holder, self.namespace, self.keys)


@dataclass(frozen=True, slots=True)
class ToSave:
    """A record to be written. cells and snapshots: of the parts that are not on disk yet; they are owned
    memory, and stay as they are until the write has ended."""

    kind: RecordKind
    holder: Holder
    namespace: Namespace
    keys: Keys
    spans: tuple[PartKey, ...]
    states: tuple[CutHash, ...]
    cells: Mapping[PartKey, HostCells]
    snapshots: Mapping[bytes, Snapshot]

    def record(self, geometry: Geometry) -> NewRecord:
        """Return the record, whose tensors are views of the memory here."""
        tensors = {part: cell_tensors(cells, geometry) for part, cells in self.cells.items()}
        for position, prefix in self.states:
            if prefix in self.snapshots:
                part = (position, position, prefix)
                tensors[part] = state_tensors(self.snapshots[prefix], geometry)
        return NewRecord(
            kind=self.kind,
            namespace=self.namespace.digest,
            keys=self.keys,
            cuts=self.holder.cuts,
            pure_length=self.holder.pure_length,
            last_start=self.holder.last_start,
            spans=self.spans,
            states=self.states,
            tensors=tensors,
        )


def on_disk(live: Mapping[str, Stored], known: Mapping[str, OnDisk]) -> dict[str, OnDisk]:
    """Return what can be used, by name; what is `known` is taken from there."""
    return {
        name: known[name] if name in known else OnDisk.of(stored, used)
        for used, (name, stored) in enumerate(live.items())
    }


def cell_tensors(cells: HostCells, geometry: Geometry) -> list[Tensor]:
    return [
        _stored(_cell_name(spec), tensor) for spec, tensor in zip(geometry.cells, cells.tensors, strict=True)
    ]


def state_tensors(snapshot: Snapshot, geometry: Geometry) -> list[Tensor]:
    return [
        _stored(_state_name(spec), tensor)
        for spec, tensor in zip(geometry.states, snapshot.states, strict=True)
    ]


def cells_of(part: PartKey, tensors: Sequence[Tensor], geometry: Geometry) -> HostCells:
    """Return the cells that a span's tensors are; raises Broken where they are not this model's."""
    start, stop, _ = part
    wanted = [(_cell_name(s), s.dtype, (s.heads, stop - start, s.dim)) for s in geometry.cells]
    return HostCells(start, stop, _checked(wanted, tensors))


def snapshot_of(position: int, tensors: Sequence[Tensor], geometry: Geometry) -> Snapshot:
    """Return the running state that a state's tensors are; raises Broken where they are not this model's."""
    wanted = [(_state_name(spec), spec.dtype, spec.shape) for spec in geometry.states]
    return Snapshot(position, _checked(wanted, tensors))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes; a view of them where it is contiguous and in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _cell_name(spec: CellSpec) -> str:
    return f"L{spec.layer}.{spec.name}"


def _state_name(spec: StateSpec) -> str:
    return f"L{spec.layer}.{spec.kind}{spec.index}"


def _stored(name: str, tensor: torch.Tensor) -> Tensor:
    return Tensor(name, DTYPES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor))


def _checked(
    wanted: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], tensors: Sequence[Tensor]
) -> tuple[torch.Tensor, ...]:
    found = {tensor.name: tensor for tensor in tensors}
    if found.keys() != {name for name, _, _ in wanted}:
        raise Broken("its tensors are not those of this model")
    for name, dtype, shape in wanted:
        if (found[name].dtype, found[name].shape) != (DTYPES[dtype], shape):
            raise Broken(f"{name}: its shape or dtype is not this model's")
    return tuple(torch.from_numpy(found[name].data).view(dtype).view(shape) for name, dtype, shape in wanted)
