"""The disk tier as a whole: opened before the actors start, closed after they have stopped."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from regrow.actors.disk import DiskActor
from regrow.actors.disk_loop import DiskLoop
from regrow.actors.disk_messages import LiveRecords, SaveSession, WriteOut
from regrow.actors.on_disk import OnDisk, on_disk
from regrow.actors.runtime import ActorRef
from regrow.actors.served import Served
from regrow.actors.threads import Threads
from regrow.config import EngineSettings
from regrow.errors import ActorDown, BadConfig, DeadlineExceeded, Overloaded
from regrow.gpu.memory import MIB
from regrow.store.files import Files, OsFiles
from regrow.store.records import Records

log = structlog.get_logger(__name__)
GIB = 1 << 30
FLOOR = GIB  # bytes that stay free on the file system
WRITE_OUT_S = 15.0  # at the end what is not on disk yet gets so long


@dataclass(frozen=True, slots=True)
class DiskTier:
    """live: the records that can be used at the start."""

    records: Records
    directory: str
    live: Mapping[str, OnDisk]

    @classmethod
    def open(cls, settings: EngineSettings, served: Served, files: Files | None = None) -> "DiskTier | None":
        """Lock the directory and read what is in it; None without one, or without a cache. Blocks.

        files: instead of the directory. Raises BadConfig where it cannot be had, or another process has it.
        """
        directory = settings.cache_dir
        if not settings.cache or (directory is None and files is None):
            return None
        real = files is None
        files = OsFiles(directory) if directory is not None and files is None else files
        assert files is not None
        records = Records(files, served.namespace.digest, 0, FLOOR if real else 0)
        try:
            records.open()
        except OSError as error:
            files.close()
            raise BadConfig(f"--cache-dir: {directory}: {error}; give one that can be read") from None
        if settings.cache_disk_gib is None:  # of what is free, or taken by records already
            records.budget = (files.free() + records.used) // 2
        else:
            records.budget = int(settings.cache_disk_gib * GIB)
        log.info(
            "disk tier",
            state="on",
            directory=str(directory),
            budget=f"{records.budget // MIB} MiB",
            used=f"{records.used // MIB} MiB",
            records=len(records.live()),
            of_other_models=len(records.foreign),
            set_aside=len(records.files_aside),
        )
        return cls(records, str(directory), on_disk(records.live(), {}))

    def wire(
        self, served: Served, threads: Threads, tell: Callable[[str, object], None], now: Callable[[], float]
    ) -> tuple[DiskLoop, Callable[[], DiskActor]]:
        """Return what the disk's thread drives, and what makes a life of its actor. tell: reaches actors."""

        def changed(live: Mapping[str, OnDisk]) -> None:
            threads.deliver(lambda: tell("disk", LiveRecords(live)))

        loop = DiskLoop(self.records, self.live, now, changed)
        return loop, lambda: DiskActor(
            loop=loop,
            directory=self.directory,
            disk_budget=self.records.budget,
            budget=served.budget,
            geometry=served.runner.geometry,
            threads=threads,
            tell=tell,
            now=now,
        )

    async def write_out(self, slots: Sequence[ActorRef], cache: ActorRef) -> None:
        """Bring to disk what is not there yet, as far as there is time."""
        with contextlib.suppress(DeadlineExceeded, ActorDown, Overloaded):
            for slot in slots:
                await slot.ask(SaveSession(), WRITE_OUT_S)
            await cache.ask(WriteOut(), WRITE_OUT_S)

    def close(self) -> None:
        """Let another process have the directory."""
        self.records.files.close()
