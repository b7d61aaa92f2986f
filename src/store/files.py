"""The directory of the disk tier: few operations, each of which may fail or be the last before a power cut.

What the records rely on: data is on disk after `Output.sync`, names after `Files.sync`, a rename replaces
whole or not at all. A test's disk tears and reorders all the rest. Everything raises OSError.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from regrow.errors import BadConfig

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """size in bytes; used: when it was last written or touched, in seconds since 1970."""

    size: int
    used: float


class Output(Protocol):
    """A file being written."""

    def write(self, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Return once everything written is on disk."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """One directory, whose files are named without their path."""

    def facts(self) -> Mapping[str, FileFacts]: ...

    def create(self, name: str) -> Output:
        """Open a new, empty file; one of that name is replaced."""
        ...

    def read(self, name: str, offset: int, into: Bytes) -> int:
        """Fill `into` from `offset` on; return how many bytes there were."""
        ...

    def rename(self, old: str, new: str) -> None: ...

    def unlink(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        ...

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
        ...

    def sync(self) -> None:
        """Return once every rename and unlink is on disk."""
        ...

    def free(self) -> int:
        """Return the bytes that are free on the file system."""
        ...

    def close(self) -> None: ...


class OsFiles:
    """A real directory, locked by this process until `close`; made private (0700) where it is new.

    Raises BadConfig where another process has it, or it cannot be had.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise BadConfig(
                f"--cache-dir: {directory}: {error.strerror}; give a directory that can be made"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise BadConfig(
                f"--cache-dir: {directory} is in use by another regrow process; stop it, or give another one"
            ) from None

    def facts(self) -> Mapping[str, FileFacts]:
        found = {}
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):
                stat = path.stat()
                if path.is_file():
                    found[path.name] = FileFacts(stat.st_size, stat.st_mtime)
        return found

    def create(self, name: str) -> Output:
        return _OsOutput(os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))

    def read(self, name: str, offset: int, into: Bytes) -> int:
        fd = os.open(self._directory / name, os.O_RDONLY)
        try:
            done = 0
            while done < len(into) and (n := os.preadv(fd, [into.data[done:]], offset + done)):
                done += n
            return done
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        (self._directory / old).rename(self._directory / new)

    def unlink(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        os.utime(self._directory / name)

    def sync(self) -> None:
        os.fsync(self._fd)

    def free(self) -> int:
        return shutil.disk_usage(self._directory).free

    def close(self) -> None:
        os.close(self._fd)


class _OsOutput:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            n = os.write(self._fd, view)
            if not n:
                raise OSError(errno.EIO, "nothing was written")
            view = view[n:]

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
