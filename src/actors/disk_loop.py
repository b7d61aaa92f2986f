"""The disk's thread: one read, write or removal of records at a time, reads also between pieces of a write.

A piece is followed by a rest as long as itself, so that writing behind takes at most half of the disk.
Whatever a job raises is its answer; an error of the disk in a write makes the tier read only for a while.
"""

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from regrow.actors.on_disk import OnDisk, on_disk
from regrow.store.record import Broken, RecordKind
from regrow.store.records import NewRecord, NoRoom, Records, Stored

log = structlog.get_logger(__name__)
RETRY_S = 30.0  # after an error of the disk nothing is written for so long
LONGEST_REST_S = 1.0
SMOOTH = 0.3  # weight of the newest measurement
DiskState = Literal["on", "read only", "full"]


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """What the disk's thread did and how it is. rate: bytes a second that a read is expected to run at; None
    before anything was measured. Sizes in bytes; written and read with the seconds they took."""

    state: DiskState = "on"
    reason: str = ""
    records: int = 0
    used: int = 0
    foreign: int = 0
    set_aside: int = 0
    written: int = 0
    written_bytes: int = 0
    written_s: float = 0.0
    restored: int = 0
    restored_bytes: int = 0
    restored_s: float = 0.0
    failed: int = 0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class RecordReport:
    """One record that can be used. nbytes: of its own file. used_at: when it was last written or read, in
    seconds since 1970. uses: how often it was read from since the start."""

    name: str
    kind: RecordKind
    tokens: int
    nbytes: int
    used_at: float
    uses: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write the record that `make` returns; done gets None, or the error."""

    make: Callable[[], NewRecord]
    done: Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class Use:
    """Run a function on the records; done gets its result, or the error. urgent: before what waits, and
    between the pieces of a write."""

    function: Callable[[Records], object]
    done: Callable[[object], None]
    urgent: bool = False


Job = Write | Use


@dataclass(slots=True)
class _Writing:
    """A record of which some pieces are written: bytes of the tensors it was given, seconds so far."""

    write: Write
    pieces: Generator[None, None, None]
    nbytes: int
    seconds: float = 0.0


class DiskLoop:
    """Implements `Steppable`. live: the records that can be used, by name, oldest first. changed: told them
    on this thread when they are others, before the answer of the job that made them so. now: a clock in
    seconds. uses: how often records were read from, by name."""

    def __init__(
        self,
        records: Records,
        live: Mapping[str, OnDisk],
        now: Callable[[], float],
        changed: Callable[[Mapping[str, OnDisk]], None],
    ) -> None:
        self._records = records
        self.live = live
        self._now = now
        self._changed = changed
        self._jobs: deque[Job] = deque()
        self._urgent: deque[Use] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._writing: _Writing | None = None
        self._paused_until = 0.0
        self.counters = DiskCounters()
        self.uses = Counter[str]()
        self.contents: tuple[RecordReport, ...] = ()
        self._count(records.live())

    def post(self, job: Job) -> None:
        """Give the thread a job; from any thread."""
        with self._news:
            if isinstance(job, Use) and job.urgent:
                self._urgent.append(job)
            else:
                self._jobs.append(job)
            self._news.notify()

    def step(self) -> bool:
        """Carry out one job, or one piece of a write; False when there was none."""
        if self._urgent:
            self._use(self._urgent.popleft())
        elif self._writing is not None:
            self._go_on(self._writing)
        elif self._jobs:
            job = self._jobs.popleft()
            if isinstance(job, Use):
                self._use(job)
            else:
                self._begin(job)
        else:
            return False
        return True

    @property
    def awake(self) -> bool:
        return bool(self._closed or self._urgent or self._jobs or self._writing)

    def wait(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self.awake)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()

    @property
    def closed(self) -> bool:
        return self._closed

    def _use(self, job: Use) -> None:
        result: object
        try:
            result = job.function(self._records)
        except Exception as error:  # noqa: BLE001  it is the answer
            result = error
        self._tell()
        job.done(result)

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note how long it took to restore so many bytes; called in a job."""
        counters = self.counters
        rate = _towards(counters.rate, nbytes, seconds)
        self.counters = replace(
            counters,
            restored=counters.restored + 1,
            restored_bytes=counters.restored_bytes + nbytes,
            restored_s=counters.restored_s + seconds,
            rate=rate,
        )

    def _begin(self, write: Write) -> None:
        if self._now() < self._paused_until:
            self._end(write, NoRoom(self.counters.reason))
            return
        try:
            new = write.make()
        except Exception as error:  # noqa: BLE001  it is the answer
            self._failed(error)
            self._end(write, error)
        else:
            nbytes = sum(tensor.data.nbytes for tensors in new.tensors.values() for tensor in tensors)
            self._writing = _Writing(write, self._records.write(new), nbytes)

    def _go_on(self, writing: _Writing) -> None:
        begin = self._now()
        try:
            next(writing.pieces)
        except StopIteration:
            writing.seconds += self._now() - begin
            self._wrote(writing)
        except Exception as error:  # noqa: BLE001  it is the answer
            self._failed(error)
            self._end(writing.write, error)
        else:
            seconds = self._now() - begin
            writing.seconds += seconds
            self._rest(seconds)

    def _wrote(self, writing: _Writing) -> None:
        counters, nbytes, seconds = self.counters, writing.nbytes, writing.seconds
        rate = counters.rate
        if seconds and rate is not None and nbytes / seconds > rate:
            rate = _towards(rate, nbytes, seconds)  # a disk that has become faster is found out so
        if counters.state != "on":
            log.info("disk tier", state="on", was=counters.state)
        self.counters = replace(
            counters,
            state="on",
            reason="",
            written=counters.written + 1,
            written_bytes=counters.written_bytes + nbytes,
            written_s=counters.written_s + seconds,
            rate=rate,
        )
        self._end(writing.write, None)

    def _failed(self, error: Exception) -> None:
        """Note why a record was not written; after an error of the disk, write nothing for a while."""
        state: DiskState = self.counters.state
        match error:
            case NoRoom():
                state = "full"
            case OSError():
                state = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "read only"
                self._paused_until = self._now() + RETRY_S
            case Broken():
                pass  # of the record that it was to go on from
            case _:
                log.error("disk tier", error=repr(error), exc_info=error)
        if state != self.counters.state:
            log.warning("disk tier", state=state, reason=str(error))
        reason = "" if state == "on" else str(error)
        self.counters = replace(self.counters, state=state, reason=reason, failed=self.counters.failed + 1)

    def _end(self, write: Write, error: Exception | None) -> None:
        self._writing = None
        self._tell()
        write.done(error)

    def _rest(self, seconds: float) -> None:
        with self._news:
            if not (self._closed or self._urgent) and seconds > 0:
                self._news.wait(min(seconds, LONGEST_REST_S))

    def _tell(self) -> None:
        live = self._records.live()
        self._count(live)
        if live.keys() != self.live.keys():
            self.live = on_disk(live, self.live)
            self._changed(self.live)

    def _count(self, live: Mapping[str, Stored]) -> None:
        records = self._records
        self.contents = tuple(
            RecordReport(
                name,
                stored.header.kind,
                stored.header.length,
                stored.size,
                records.used_at(name),
                self.uses[name],
            )
            for name, stored in live.items()
        )
        self.counters = replace(
            self.counters,
            records=len(live),
            used=records.used,
            foreign=len(records.foreign),
            set_aside=len(records.files_aside),
        )


def _towards(rate: float | None, nbytes: int, seconds: float) -> float | None:
    """Return the rate after a measurement: the time for a byte is smoothed, so that a slow disk shows at
    once."""
    if not nbytes or seconds <= 0:
        return rate
    new = seconds / nbytes
    return 1 / (new if rate is None else 1 / rate + SMOOTH * (new - 1 / rate))
