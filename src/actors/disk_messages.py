"""The messages of the disk tier: between slots and cache, and between cache, disk and engine.

Asks go only Slot -> Cache; to the disk, and from it, there are only tells.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from regrow.actors.disk_loop import DiskCounters, RecordReport
from regrow.actors.on_disk import OnDisk, ToSave
from regrow.actors.parking import Parkable
from regrow.actors.runtime import Ask
from regrow.gpu.types import HostCells, Snapshot
from regrow.policy.directory import HolderId


@dataclass(frozen=True, slots=True)
class SaveIdle:
    """To a slot from itself, a while after its request has ended: save the session if it is still this
    version (D5)."""

    version: int


@dataclass(frozen=True, slots=True)
class SaveNow:
    """From the cache to a slot: the disk has time for what it wanted to save."""


@dataclass(frozen=True, slots=True)
class SaveSession(Ask[None]):
    """To a slot: offer what it holds to the disk tier now."""


@dataclass(frozen=True, slots=True)
class Save(Ask[tuple[HolderId, tuple[tuple[int, int], ...]] | None]):
    """To the cache: write what `slot` holds to disk; None is nothing. Answered with a name and the ranges of
    cells to be copied for it, or None: nothing needs to be, there is no room, or `SaveNow` will say when."""

    slot: HolderId
    what: Parkable | None


@dataclass(frozen=True, slots=True)
class Restore(Ask[HolderId | None]):
    """To the cache: bring the first `position` keys of a record into memory, with the state there. Answered
    with the parked conversation that has them then, or None."""

    record: HolderId
    position: int


@dataclass(frozen=True, slots=True)
class WriteOut(Ask[None]):
    """To the cache: answered when nothing is left to be written to disk."""


@dataclass(frozen=True, slots=True)
class WriteRecords:
    """To the disk: write these records, in order. The cache hears `RecordsWritten`."""

    name: HolderId
    records: tuple[ToSave, ...]


@dataclass(frozen=True, slots=True)
class RecordsWritten:
    """To the cache: the write named `name` is over."""

    name: HolderId
    well: bool


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """To the disk: read parts of a record. The cache hears `RecordRead`.

    name: the parked conversation they are for. spans: (start, stop, prefix). states: (position, prefix).
    """

    name: HolderId
    record: str
    spans: tuple[tuple[int, int, bytes], ...]
    states: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class RecordRead:
    """To the cache: the parts are in memory, each as it was written; None where that failed."""

    name: HolderId
    parts: tuple[tuple[HostCells, ...], tuple[tuple[bytes, Snapshot], ...]] | None


@dataclass(frozen=True, slots=True)
class PurgeRecords:
    """To the disk: remove every record that shares one of these cuts; None: every record, and what it has of
    other models stays."""

    prefixes: frozenset[bytes] | None


@dataclass(frozen=True, slots=True)
class ForgetRoot:
    """To the disk: remove the record of this root, where no conversation needs it."""

    prefix: bytes


@dataclass(frozen=True, slots=True)
class DiskChanged:
    """From the disk to the cache and the engine: the records that can be used now, as far as they are news,
    those that cannot any more, and at how many bytes a second they are read."""

    added: tuple[OnDisk, ...]
    gone: tuple[HolderId, ...]
    rate: float | None


@dataclass(frozen=True, slots=True)
class DiskReport:
    """The disk tier: its directory, budget and counters, sizes in bytes."""

    directory: str
    budget: int
    counters: DiskCounters


@dataclass(frozen=True, slots=True)
class DiskStats(Ask[DiskReport]):
    """To the disk."""


@dataclass(frozen=True, slots=True)
class DiskContents(Ask[tuple[RecordReport, ...]]):
    """To the disk: say which records can be used, oldest first."""


@dataclass(frozen=True, slots=True)
class LiveRecords:
    """To the disk actor from its thread: the records that can be used now, by name, oldest first."""

    records: Mapping[str, OnDisk]
