"""Conversations that the engine has lost are read shortened (C3 to C10, where cold is known, not predicted).

A conversation is known to be cold iff it was seen before, no tier holds any of it past its system prompt, and
its last use is older than the TTL: all of it has to be read then anyway, and long old tool results are left
out of it. From that turn on they stay out, also after a restart, so that what was read then is hit. Every
doubt means warm. A request whose `cache` is not "on" keeps nothing of its conversation and so decides
nothing; it is given what an earlier turn has decided, so that its answer is the same (S9).
"""

import asyncio
import fcntl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import structlog

from regrow.actors.events import RepackDecision, Repacked
from regrow.actors.threads import Threads
from regrow.config import EngineSettings
from regrow.errors import BadConfig, RegrowError
from regrow.policy.cold_prefix import Book, Latch, Turn, is_known_cold, latches_of, left_out, settle, turn_of
from regrow.policy.history import Message, Pruned, prune
from regrow.policy.keys import Namespace
from regrow.policy.request import GenerateRequest
from regrow.store.clock import SteadyClock
from regrow.store.data_directory import data_directory
from regrow.store.originals import Originals
from regrow.store.touches import Touches

DIRECTORY = "engine"

log = structlog.get_logger(__name__)
Prefixes = frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Considered:
    """A request as it is to be served. key: of its conversation, which is in use until `ended`."""

    request: GenerateRequest
    repacked: Repacked | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class RepackReport:
    """Conversations that are tracked, those of them with a latch, and requests that were shortened: at the
    turn at which their conversation was known to be lost, and later."""

    tracked: int
    latched: int
    cold: int
    sticky: int


@dataclass(frozen=True, slots=True)
class ColdBook:
    """What is known of conversations, in a directory that no other engine uses meanwhile. Methods block."""

    touches: Touches
    originals: Originals
    clock: SteadyClock
    ttl_s: float
    owned: BinaryIO

    @classmethod
    def open(cls, settings: EngineSettings, namespace: Namespace, clock: SteadyClock) -> "ColdBook":
        """Open the book of what serves `namespace`: one engine's, since what one has lost another may hold.

        Raises BadConfig.
        """
        if not settings.cache:
            raise BadConfig("--repack-cold: not together with --cache off, which keeps nothing to be lost")
        data_dir = data_directory(settings.data_dir)
        directory = data_dir / DIRECTORY / namespace.digest
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            owned = (directory / "owner.lock").open("wb")
            fcntl.flock(owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(
                Touches(directory, clock), Originals(data_dir), clock, settings.conversation_ttl, owned
            )
        except BlockingIOError:
            owned.close()
            raise BadConfig(f"--data-dir {data_dir}: another server of this model uses it") from None
        except OSError as error:
            raise BadConfig(f"--data-dir {data_dir}: {error.strerror}") from None

    def close(self) -> None:
        self.touches.save()
        self.owned.close()


class KnownCold:
    """prefixes: the hashes of a prompt's cuts past its system prompt. holds: whether any tier may hold one of
    these; both may raise."""

    def __init__(
        self,
        book: ColdBook,
        threads: Threads,
        prefixes: Callable[[GenerateRequest], Prefixes],
        holds: Callable[[Prefixes], Awaitable[bool]],
    ) -> None:
        self._touches, self._originals = book.touches, book.originals
        self._now, self._ttl_s = book.clock.now, book.ttl_s
        self._threads = threads
        self._prefixes, self._holds = prefixes, holds
        self._decided: Counter[str] = Counter()

    async def consider(self, request: GenerateRequest) -> Considered:
        """Decide on one request; `ended` must follow, with the key, once it has ended. Raises BadRequest."""
        if not request.messages:
            return Considered(request)
        turn = await self._threads.run(lambda: self._turn(request))
        key = turn.key
        if key is None:
            return Considered(request)
        if request.cache != "on":
            latches = self._latches(turn)
            return await self._threads.run(lambda: self._shortened(request, latches))
        rests = is_known_cold(self._touches.book, turn, False, self._now())
        held = not rests or await self._held(request, turn)
        deciding = asyncio.ensure_future(self._threads.run(lambda: self._decide(request, turn, key, held)))
        try:
            return await asyncio.shield(deciding)
        except asyncio.CancelledError:  # the client has gone; what it opened is closed once it is open
            deciding.add_done_callback(lambda _: self.ended(key))
            raise

    def ended(self, key: str | None) -> None:
        """Take note that a request has ended, however it did; its end is a use too (C4)."""
        if key is not None:
            self._touches.ended(key)

    def original(self, name: str) -> str | None:
        """Return a text that was left out, by the name that stands for it. Blocks."""
        return self._originals.get(name)

    def report(self) -> RepackReport:
        book = self._touches.book
        latched = sum(bool(record.latches) for record in book.values())
        return RepackReport(len(book), latched, self._decided["cold"], self._decided["sticky"])

    def _turn(self, request: GenerateRequest) -> Turn:
        """Return the request as the rules see it: all is kept; each salt has chats of its own."""
        everything = len(request.messages)
        return turn_of(
            request.messages, request.cache_salt, request.tools, cached=everything, ttl=self._ttl_s
        )

    def _latches(self, turn: Turn) -> tuple[Latch, ...]:
        seen = self._touches.book.get(turn.key or "")
        return () if seen is None else latches_of(seen.latches, turn)

    async def _held(self, request: GenerateRequest, turn: Turn) -> bool:
        """Say whether any tier may hold the conversation, in the shape in which it was served last."""
        served = replace(request, messages=_pruned(request.messages, self._latches(turn)).messages)
        prefixes = await self._threads.run(lambda: self._prefixes(served))
        try:
            return not prefixes or await self._holds(prefixes)
        except RegrowError as error:
            log.warning("cannot tell whether a conversation is held", reason=str(error))
            return True

    def _decide(self, request: GenerateRequest, turn: Turn, key: str, held: bool) -> Considered:
        def step(book: Book, now: float) -> tuple[tuple[bool, tuple[Latch, ...]], Book]:
            cold = is_known_cold(book, turn, held, now)
            repack, book = settle(book, turn, cold, now)
            return (cold, latches_of(book[key].latches, turn) if repack else ()), book

        cold, latches = self._touches.decide(key, step)
        return replace(self._shortened(request, latches, cold), key=key)

    def _shortened(
        self, request: GenerateRequest, latches: Iterable[Latch], cold: bool = False
    ) -> Considered:
        """Return the request without what the latches leave out, and say what that is."""
        pruned = _pruned(request.messages, latches)
        if not pruned.originals:
            return Considered(request)
        decision: RepackDecision = "cold" if cold else "sticky"
        self._decided[decision] += 1
        try:
            self._originals.keep(pruned.originals)
        except OSError as error:  # the client has them: it sends them every time
            log.warning("originals cannot be kept", reason=str(error))
        repacked = Repacked(decision, *left_out(request.messages, pruned.messages))
        return Considered(replace(request, messages=pruned.messages), repacked)


def _pruned(messages: Sequence[Message], latches: Iterable[Latch]) -> Pruned:
    originals: dict[str, str] = {}
    for latch in latches:
        pruned = prune(messages, latch.boundary, latch.start)
        messages = pruned.messages
        originals.update(pruned.originals)
    return Pruned(messages, originals)
