"""The texts that were shortened on their way to a provider, by their hash, so that nothing is lost.

One file a text, under `originals/` in the data directory. Above the limit the ones written longest ago leave;
a text that is shortened again is written again.
"""

import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DIRECTORY = "originals"
LIMIT_BYTES = 1 << 30
NAME = re.compile(r"[0-9a-f]{24}")


class Originals:
    """Kept in `directory`; in no place where that is None. Raises OSError where the disk does."""

    def __init__(self, directory: Path | None, limit_bytes: int = LIMIT_BYTES) -> None:
        self._directory = None if directory is None else directory / DIRECTORY
        self._limit = limit_bytes
        self._lock = threading.Lock()
        if self._directory is not None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._bytes = sum(size for _, size, _ in self._files())

    def keep(self, texts: Mapping[str, str]) -> None:
        """Write the texts that are not there yet, each to a temporary file that is renamed."""
        if self._directory is None:
            return
        with self._lock:
            for name, text in texts.items():
                path = self._directory / name
                if not path.exists():
                    part = path.with_name(f".{name}.{os.getpid()}")
                    self._bytes += part.write_bytes(text.encode(errors="surrogatepass"))
                    part.replace(path)
            if self._bytes > self._limit:
                self._shrink()

    def get(self, name: str) -> str | None:
        """Return an original; None where there is none of that name."""
        if self._directory is None or not NAME.fullmatch(name):
            return None
        path = self._directory / name
        return path.read_bytes().decode(errors="surrogatepass") if path.exists() else None

    def _shrink(self) -> None:
        """Remove the oldest until a tenth is free again."""
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._bytes <= self._limit * 9 // 10:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        if self._directory is None:
            return []
        found = []
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # another relay shrinks it
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found
