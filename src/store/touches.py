"""The book of touches and latches, kept across restarts and shared by relays on one data directory (C8).

The file is `cold_prefix_touch.json`, written to a temporary file and renamed, under a lock, merged with what
stands there. A conversation's record is written at once when it is new, latched, or over 30 s old on disk,
else within 30 s. So after a crash, and in the eyes of another relay, it is late by less than `STALE_S`, which
is added to every touch that others wrote; and a decision that could be "cold" is always made with the lock
held and the file merged.

What cannot be locked, read or written means warm: a latch that could not be kept is not set.
"""

import fcntl
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import structlog

from regrow.policy.cold_prefix import Book, Conversation, Latch, merged, touch
from regrow.store.clock import SteadyClock

FILE = "cold_prefix_touch.json"
VERSION = 1
EVERY_S = 30.0
STALE_S = 90.0
ROUNDING_S = 1e-3  # what a stamp may change by on its way from one process's base to another's
LOCK_TRIES, LOCK_PAUSE_S = 100, 0.02

T = TypeVar("T")
Step = Callable[[Book, float], tuple[T, Book]]
log = structlog.get_logger(__name__)


class TouchFile(msgspec.Struct, frozen=True):
    """What the file holds: stamps in seconds on the line of the clock with this boot and base."""

    version: int
    boot: str
    base: float
    conversations: dict[str, Conversation]


class Touches:
    """The book of one relay. Methods may be called from any thread; they block for a file's time at most.

    directory: None keeps the book in memory only. keep_latches: off for a dry run, whose latches are its own.
    """

    def __init__(self, directory: Path | None, clock: SteadyClock, keep_latches: bool = True) -> None:
        self._path = None if directory is None else directory / FILE
        self._clock = clock
        self._keep_latches = keep_latches
        self._lock = threading.Lock()
        self._book: Book = {}
        self._disk: Book = {}
        self._unwritten: set[str] = set()
        self._open: Counter[str] = Counter()
        self._ended: deque[tuple[str, float]] = deque()
        self._told: set[str] = set()
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.resume_from_disk()

    @property
    def book(self) -> Book:
        return self._book

    def resume_from_disk(self) -> None:
        """Merge what the file holds; a missing or corrupt one is empty. It is written again at once, so that
        its stamps are on the line of this boot's clock from now on."""
        with self._lock:
            now = self._clock.now()
            try:
                with self._exclusively():
                    self._write(self._merge(self._read(now), now), self._book, set())
            except OSError as error:
                self._tell("cannot be written", error)

    def decide(self, key: str, step: Step[T]) -> T:
        """Run one decision on the book and open a response of the conversation: `ended` must follow.

        `step` is pure: it may be run again, on a book that knows what other relays wrote.
        """
        with self._lock:
            now = self._clock.now()
            self._count_open(now)
            answer, book = step(self._book, now)
            if self._is_news(key, book, now):
                answer, book = self._decide_with_file(key, step, now)
            self._book = book
            self._unwritten.add(key)
            self._open[key] += 1
            return answer

    def ended(self, key: str) -> None:
        """Record the last byte of a response. Never blocks."""
        self._ended.append((key, self._clock.now()))

    def save(self) -> None:
        """Write what is not written yet; to be called every 30 s, and at the end."""
        with self._lock:
            now = self._clock.now()
            self._count_open(now)
            if self._path is None or not self._unwritten:
                return
            try:
                with self._exclusively():
                    on_disk = self._merge(self._read(now), now)
                    self._write(on_disk, self._book, self._unwritten)
            except OSError as error:
                self._tell("cannot be written", error)

    def _decide_with_file(self, key: str, step: Step[T], now: float) -> tuple[T, Book]:
        try:
            with self._exclusively():
                on_disk = self._merge(self._read(now), now)
                answer, book = step(self._book, now)
                self._write(on_disk, merged(self._book, {key: book[key]}), {*self._unwritten, key})
                return answer, book
        except OSError as error:
            self._tell("cannot be written", error)
        return step(touch(self._book, {key: now}), now)

    def _is_news(self, key: str, book: Book, now: float) -> bool:
        if self._path is None:
            return False
        known = self._disk.get(key)
        if known is None or now - known.touched > EVERY_S:
            return True
        return self._keep_latches and not _names(book[key]) <= _names(known)

    def _count_open(self, now: float) -> None:
        """Touch every conversation with an open response, and those whose last one ended."""
        uses = {}
        while self._ended:
            key, at = self._ended.popleft()
            uses[key] = at
            self._open[key] -= 1
        self._open = +self._open
        uses |= dict.fromkeys(self._open, now)
        self._book = touch(self._book, uses)
        self._unwritten |= uses.keys()

    def _merge(self, on_disk: Book, now: float) -> Book:
        """Take over what others wrote, as late as it may be; returns the file's records."""
        news = {}
        for key, record in on_disk.items():
            known = self._disk.get(key)
            if known is None or record.touched > known.touched + ROUNDING_S:
                news[key] = replace(record, touched=min(now, record.touched + STALE_S))
            elif record != known:
                news[key] = record
        self._book = merged(self._book, news)
        self._disk = on_disk
        return on_disk

    def _read(self, now: float) -> Book:
        """Return the file's records on our line of time; none of them can be from the future."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=TouchFile)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._tell("is corrupt and counts as empty", error)
            return {}
        if file.version != VERSION:
            self._tell("is of another version and counts as empty", file.version)
            return {}
        shift = self._clock.base - file.base if file.boot == self._clock.boot else 0.0
        return {
            key: replace(record, touched=min(now, record.touched + shift))
            for key, record in file.conversations.items()
        }

    def _write(self, on_disk: Book, book: Book, keys: set[str]) -> None:
        """Write the file's records, those of `keys` in `book`, and what a lost file lacks."""
        if self._path is None:
            return
        ours = {key: record for key, record in book.items() if key in keys or key not in on_disk}
        if not self._keep_latches:
            ours = {key: replace(record, latches=()) for key, record in ours.items()}
        united = merged(on_disk, ours)
        file = TouchFile(VERSION, self._clock.boot, self._clock.base, dict(united))
        part = self._path.with_suffix(".part")
        with _private(part) as out:
            out.write(msgspec.json.encode(file))
            out.flush()
            os.fsync(out.fileno())
        part.replace(self._path)
        self._disk = united
        self._unwritten.clear()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the lock of the file between processes; raises TimeoutError (an OSError) after 2 s."""
        if self._path is None:
            yield
            return
        with _private(self._path.with_suffix(".lock")) as lock:
            for _ in range(LOCK_TRIES):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(LOCK_PAUSE_S)
            else:
                raise TimeoutError("another process holds the lock")
            yield

    def _tell(self, what: str, reason: object) -> None:
        """Log what is wrong with the file, each kind of trouble once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("touch file", what=what, file=str(self._path), reason=str(reason))


def _names(record: Conversation) -> set[Latch]:
    """Return a conversation's latches, whenever they were last used."""
    return {replace(latch, used=0.0) for latch in record.latches}


def _private(path: Path) -> BinaryIO:
    """Open a file for writing that nobody else may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
