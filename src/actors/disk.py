"""DiskActor: what is on disk, as the cache and the engine should know it, and the way to the disk's thread.

It waits for nothing: its thread (`disk_loop.py`) does the reading and writing, and what comes of it is told.
"""

import functools
from collections.abc import Callable, Mapping

import structlog

from regrow.actors.disk_loop import DiskLoop, Use, Write
from regrow.actors.disk_messages import (
    DiskChanged,
    DiskContents,
    DiskReport,
    DiskStats,
    ForgetRoot,
    LiveRecords,
    PurgeRecords,
    ReadRecord,
    RecordRead,
    RecordsWritten,
    WriteRecords,
)
from regrow.actors.messages import Holds
from regrow.actors.on_disk import OnDisk, cells_of, snapshot_of
from regrow.actors.runtime import Down
from regrow.actors.shelf import KEY_BYTES
from regrow.actors.threads import Threads
from regrow.gpu.types import Geometry
from regrow.policy.directory import HolderId
from regrow.store.record import Broken
from regrow.store.records import Records

log = structlog.get_logger(__name__)


class DiskActor:
    """budget: bytes of host memory that what is read must fit. tell: reaches the cache and the engine. now:
    the engine clock in seconds."""

    def __init__(
        self,
        loop: DiskLoop,
        directory: str,
        disk_budget: int,
        budget: int,
        geometry: Geometry,
        threads: Threads,
        tell: Callable[[str, object], None],
        now: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._disk_budget = disk_budget
        self._budget = budget
        self._geometry = geometry
        self._threads = threads
        self._tell = tell
        self._now = now
        self._known: dict[str, OnDisk] = {}

    async def started(self) -> None:
        self._changed(self._loop.live)

    async def handle(self, message: object) -> object:
        match message:
            case LiveRecords(records):
                self._changed(records)
            case WriteRecords():
                self._write(message)
            case ReadRecord():
                self._read(message)
            case PurgeRecords(prefixes):
                self._use(functools.partial(_purge, prefixes))
            case ForgetRoot(prefix):
                self._use(functools.partial(_forget_root, prefix))
            case Holds(prefixes):
                cuts = (cut for record in self._known.values() for cut in record.holder.cuts)
                return any(prefix in prefixes for _, prefix in cuts)
            case DiskStats():
                return DiskReport(self._directory, self._disk_budget, self._loop.counters)
            case DiskContents():
                return self._loop.contents
            case Down(name):  # without the cache the engine has forgotten too
                for to in ("cache", "engine") if name == "cache" else ("engine",):
                    self._tell(to, DiskChanged(tuple(self._known.values()), (), self._loop.counters.rate))
            case _:
                raise TypeError(f"the disk does not know {type(message).__name__}")
        return None

    def check_integrity(self) -> None:
        """Assert that every record is whole, and has its states at cuts."""
        for record in self._known.values():
            edges = [0, *(stop for _, stop, _ in record.spans)]
            assert [start for start, _, _ in record.spans] == edges[:-1]
            assert edges[-1] == record.holder.length == len(record.keys) == record.holder.cuts[-1][0]
            assert set(record.states) <= set(record.holder.cuts)

    def _changed(self, live: Mapping[str, OnDisk]) -> None:
        """Tell what is news; what does not fit the memory is of no use."""
        there = {name: record for name, record in live.items() if self._size(record) <= self._budget}
        gone = tuple(HolderId("disk", name) for name in self._known if name not in there)
        added = tuple(record for name, record in there.items() if name not in self._known)
        self._known = there
        for to in ("cache", "engine"):
            self._tell(to, DiskChanged(added, gone, self._loop.counters.rate))

    def _size(self, record: OnDisk) -> int:
        return record.holder.length * (self._geometry.bytes_per_token + KEY_BYTES)

    def _write(self, write: WriteRecords) -> None:
        def done(error: Exception | None) -> None:
            self._later("cache", RecordsWritten(write.name, error is None))

        *roots, last = (functools.partial(record.record, self._geometry) for record in write.records)
        for root in roots:
            self._loop.post(Write(root, lambda error: None))
        self._loop.post(Write(last, done))

    def _read(self, read: ReadRecord) -> None:
        def load(records: Records) -> object:
            begin = self._now()
            keys = [*read.spans, *((p, p, prefix) for p, prefix in read.states)]
            try:
                found = records.read(read.record, keys)
                cells = tuple(cells_of(span, found[span], self._geometry) for span in read.spans)
                states = tuple(
                    (prefix, snapshot_of(p, found[p, p, prefix], self._geometry)) for p, prefix in read.states
                )
            except Broken as error:
                if read.record in records.live():
                    records.set_aside(read.record, str(error))
                raise
            nbytes = sum(tensor.data.nbytes for tensors in found.values() for tensor in tensors)
            self._loop.uses[read.record] += 1
            self._loop.measured(nbytes, self._now() - begin)
            return cells, states

        def done(result: object) -> None:
            failed = isinstance(result, Exception)
            self._later("engine", DiskChanged((), (), self._loop.counters.rate))
            self._later("cache", RecordRead(read.name, None if failed else result))  # type: ignore[arg-type]

        self._loop.post(Use(load, done, urgent=True))

    def _use(self, function: Callable[[Records], object]) -> None:
        self._loop.post(Use(function, _log_failure))

    def _later(self, to: str, message: object) -> None:
        """Tell an actor from the disk's thread."""
        self._threads.deliver(lambda: self._tell(to, message))


def _log_failure(result: object) -> None:
    if isinstance(result, Exception):
        log.warning("records could not be removed", error=repr(result))


def _purge(prefixes: frozenset[bytes] | None, records: Records) -> None:
    if prefixes is None:
        records.remove(records.stored)
    else:
        records.purge(prefixes)


def _forget_root(prefix: bytes, records: Records) -> None:
    roots = [
        n for n, s in records.live().items() if s.header.kind == "root" and s.header.cuts[-1][1] == prefix
    ]
    records.remove([name for name in roots if not records.is_named(name)])
