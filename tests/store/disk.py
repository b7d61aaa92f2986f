"""A disk in memory that keeps what was synced and does what it likes with the rest.

`power_cut` gives the disk that is found afterwards: of data that was not synced any 512-byte sectors have
come, of renames, new and removed names that were not synced any have. `ends_at` is the operation during which
the power goes; a write is torn by it.
"""

import errno
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from regrow.store.files import Bytes, FileFacts

SECTOR = 512


class PowerCut(BaseException):
    """The machine is off: nothing runs any more, no cleaning up neither."""


@dataclass
class Content:
    """synced: what is on disk for certain. data: what is read until the power goes."""

    synced: bytes = b""
    data: bytearray = field(default_factory=bytearray)

    def after(self, rng: random.Random) -> bytes:
        found = bytearray(self.data)
        for start in range(0, len(found), SECTOR):
            if rng.random() < 0.5:
                old = self.synced[start : start + SECTOR]
                found[start : start + SECTOR] = old.ljust(len(found[start : start + SECTOR]), b"\0")
        return bytes(found[: rng.choice([len(found), max(len(self.synced), rng.randint(0, len(found)))])])


Change = tuple[str, Content | None]  # None: the name goes


class SimulatedDisk:
    """Implements `Files`. capacity: bytes. note: told of every operation, before it is done. fails: an
    operation -> the error number that it gives from now on. lies: a sync says that it is done, and is not."""

    def __init__(
        self, capacity: int = 1 << 40, note: Callable[[str, int], None] = lambda operation, size: None
    ) -> None:
        self.capacity = capacity
        self.note = note
        self.fails: dict[str, int] = {}
        self.lies = False
        self.operations = 0
        self.ends_at: int | None = None
        self.names: dict[str, Content] = {}
        self._synced_names: dict[str, Content] = {}
        self._unsynced: list[list[Change]] = []
        self._used: dict[str, float] = {}

    def power_cut(self, rng: random.Random) -> "SimulatedDisk":
        names = dict(self._synced_names)
        for changes in self._unsynced:
            if rng.random() < 0.5:
                for name, content in changes:
                    if content is None:
                        names.pop(name, None)
                    else:
                        names[name] = content
        found = SimulatedDisk(self.capacity, self.note)
        for name, content in names.items():
            data = content.after(rng) if content.synced != content.data else content.synced
            found.names[name] = Content(data, bytearray(data))
        found._synced_names = dict(found.names)
        return found

    def operate(self, operation: str, size: int = 0) -> None:
        if self.ends_at is not None and self.operations >= self.ends_at:
            raise PowerCut
        self.operations += 1
        self.note(operation, size)
        if operation in self.fails:
            raise OSError(self.fails[operation], f"{operation} fails")
        if operation == "write" and size > self.free():
            raise OSError(errno.ENOSPC, "no space left")

    @property
    def ending(self) -> bool:
        return self.operations == self.ends_at

    def facts(self) -> Mapping[str, FileFacts]:
        return {n: FileFacts(len(c.data), self._used.get(n, 0.0)) for n, c in self.names.items()}

    def create(self, name: str) -> "Writing":
        self.operate("create")
        content = Content()
        self._change([(name, content)])
        return Writing(self, content)

    def read(self, name: str, offset: int, into: Bytes) -> int:
        self.operate("read", len(into))
        data = self._find(name).data[offset : offset + len(into)]
        into[: len(data)] = memoryview(data)
        return len(data)

    def rename(self, old: str, new: str) -> None:
        self.operate("rename")
        self._find(old)
        self._change([(new, self.names[old]), (old, None)])

    def unlink(self, name: str) -> None:
        self.operate("unlink")
        self._change([(name, None)])

    def touch(self, name: str) -> None:
        self.operate("touch")
        self._used[name] = self.operations

    def sync(self) -> None:
        self.operate("sync names")
        if self.lies:
            return
        self._synced_names = dict(self.names)
        self._unsynced.clear()

    def free(self) -> int:
        return self.capacity - sum(len(content.data) for content in self.names.values())

    def close(self) -> None:
        """There is no lock here."""

    def _find(self, name: str) -> Content:
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, name)
        return self.names[name]

    def _change(self, changes: list[Change]) -> None:
        self._unsynced.append(changes)
        for name, content in changes:
            if content is None:
                self.names.pop(name, None)
            else:
                self.names[name] = content
                self._used[name] = self.operations


class Writing:
    def __init__(self, disk: SimulatedDisk, content: Content) -> None:
        self._disk = disk
        self._content = content

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._disk.operate("write", len(view))
        torn = len(view) // 2 if self._disk.ending else len(view)
        self._content.data += view[:torn]
        if self._disk.ending:
            raise PowerCut

    def sync(self) -> None:
        self._disk.operate("sync")
        if not self._disk.lies:
            self._content.synced = bytes(self._content.data)

    def close(self) -> None:
        """What was not synced may still be lost."""
