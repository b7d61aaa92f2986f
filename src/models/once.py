"""Made once, whole or not at all: what several processes share under the model directory.

A file or directory is built beside its place under a lock, synced, and renamed into it. So a reader sees all
of it or nothing, a second process waits for the first instead of doing the work again, and what a killed
process left behind is removed by the next one.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from regrow.models.progress import Progress


def model_directory(chosen: Path | None = None) -> Path:
    """Return where fetched and converted models are kept: `chosen`, else a place in the user's cache."""
    if chosen is not None:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "regrow"


def made_once(target: Path, make: Callable[[Path], None], progress: Progress) -> Path:
    """Return `target`; where it is not there, `make(part)` builds it at another path on the same disk first.

    What `make` raises passes through, and nothing is left at `target`.
    """
    if target.exists():
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), target.name, progress):
        if target.exists():
            return target
        part = target.with_name(f".{target.name}.part")
        _remove(part)
        try:
            make(part)
            for path in (*part.rglob("*"), part):
                _sync(path)
            part.rename(target)
            _sync(target.parent)
        finally:
            _remove(part)
    return target


@contextmanager
def _locked(path: Path, what: str, progress: Progress) -> Iterator[None]:
    """Hold the only lock on `path`; the system frees it when the process ends, however it ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {what}", None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def removed_after(folder: Path) -> Iterator[Path]:
    """A new empty folder for work in between; what an earlier process left there goes first."""
    _remove(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
