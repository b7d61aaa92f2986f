"""A small actor runtime: bounded mailboxes, tell and ask, supervision with a restart limit.

Every actor is one asyncio task that handles one message at a time from its mailbox. A `tell` never
waits; an `ask` waits for the reply, with a deadline. An actor that raises is replaced by a fresh one from its
factory under the same reference; what its mailbox held is lost, asks in it fail with `ActorDown`, and its
watchers are told `Down`. More than `restarts` crashes within `period_s` seconds stop the whole system.

The runtime knows nothing of models.
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, cast

import structlog

from regrow.actors.mailbox import Mailbox, MailboxClosed
from regrow.errors import ActorDown, DeadlineExceeded, Overloaded, RegrowError

log = structlog.get_logger(__name__)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Ask(Generic[R_co]):
    """Base of messages that are answered with an R_co."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Down:
    """Told to watchers: the actor `name` crashed in its life number `epoch`; leases of that life are void."""

    name: str
    epoch: int
    reason: str


class Actor(Protocol):
    """What a supervised actor offers. A `RegrowError` that an ask raises is its answer, not a crash."""

    async def started(self) -> None:
        """Run before the first message."""

    async def handle(self, message: object) -> object:
        """Handle one message; the result answers an ask and is dropped for a tell.

        A future as the result answers the ask when it is done, and the actor goes on meanwhile.
        """


@dataclass(frozen=True, slots=True)
class MailboxStats:
    """Counters of one actor: messages waiting now, the most ever waiting, handled, restarts, busy seconds."""

    name: str
    waiting: int
    most_waiting: int
    handled: int
    restarts: int
    busy_s: float


@dataclass(slots=True)
class _Envelope:
    message: object
    reply: asyncio.Future[object] | None = None


@dataclass(slots=True)
class _Cell:
    """One supervised place: its factory, its present mailbox and task, and its counters."""

    name: str
    factory: Callable[[], Actor]
    size: int
    watchers: tuple[str, ...]
    mail: Mailbox[_Envelope] = field(default_factory=Mailbox)
    task: asyncio.Task[None] | None = None
    epoch: int = 0
    crashes: deque[float] = field(default_factory=deque)
    handled: int = 0
    most_waiting: int = 0
    busy_s: float = 0.0
    unanswered: dict[asyncio.Future[object], None] = field(default_factory=dict)  # answered by a future later

    @property
    def waiting(self) -> int:
        return len(self.mail)


class ActorRef:
    """The address of an actor: valid over restarts, and before the actor is spawned."""

    def __init__(self, name: str, cells: Mapping[str, _Cell]) -> None:
        self.name = name
        self._cells = cells

    def tell(self, message: object) -> None:
        """Put a message into the mailbox; after the actor's stop it goes nowhere. Raises Overloaded where the
        mailbox is full."""
        with contextlib.suppress(ActorDown):
            self._put(_Envelope(message))

    def post(self, message: object) -> None:
        """As `tell`, and it always finds room: for timers and threads, which nobody could tell that they were
        refused. The sender bounds how many there are."""
        with contextlib.suppress(ActorDown):
            self._put(_Envelope(message), bounded=False)

    async def ask(self, message: Ask[R], deadline_s: float, *, urgent: bool = False) -> R:
        """Put a message and wait for its answer. urgent: it finds room in a full mailbox.

        Raises what the actor raised, ActorDown when it crashed first, DeadlineExceeded after `deadline_s`
        seconds (the message may still be handled; its answer is dropped).
        """
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._put(_Envelope(message, reply), bounded=not urgent)
        try:
            async with asyncio.timeout(deadline_s):
                return cast(R, await reply)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.name} did not answer {type(message).__name__} within {deadline_s:g} s"
            ) from None

    def _put(self, envelope: _Envelope, *, bounded: bool = True) -> None:
        cell = self._cells[self.name]
        if bounded and cell.waiting >= cell.size:
            raise Overloaded(f"the mailbox of {self.name} holds {cell.size} messages and is full")
        try:
            cell.mail.put(envelope)
        except MailboxClosed:
            raise ActorDown(f"{self.name} has stopped") from None
        cell.most_waiting = max(cell.most_waiting, cell.waiting)


class System:
    """Owns the actors: spawns, supervises, stops. Use as `async with System(...) as system`.

    `failed` is set with the reason when the restart limit was exceeded; the owner then stops the system.
    """

    def __init__(self, *, restarts: int = 3, period_s: float = 60.0) -> None:
        self.restarts = restarts
        self.period_s = period_s
        self._cells: dict[str, _Cell] = {}
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def spawn(
        self, name: str, factory: Callable[[], Actor], *, mailbox: int, watchers: tuple[str, ...] = ()
    ) -> ActorRef:
        """Start an actor with a mailbox of `mailbox` messages at most; `watchers` are told of a crash."""
        if name in self._cells:
            raise ValueError(f"there is an actor {name} already")
        cell = _Cell(name, factory, mailbox, watchers)
        self._cells[name] = cell
        cell.task = self._loop.create_task(self._supervise(cell), name=name)
        return self.ref(name)

    def ref(self, name: str) -> ActorRef:
        return ActorRef(name, self._cells)

    def statistics(self) -> tuple[MailboxStats, ...]:
        return tuple(
            MailboxStats(
                name=cell.name,
                waiting=cell.waiting,
                most_waiting=cell.most_waiting,
                handled=cell.handled,
                restarts=cell.epoch,
                busy_s=cell.busy_s,
            )
            for cell in self._cells.values()
        )

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop the actors in reverse order of their start; each handles what its mailbox holds first.

        One that needs longer than `grace_s` seconds is cancelled.
        """
        self._stopping = True
        for cell in reversed(self._cells.values()):
            cell.mail.close()
            task = cell.task
            if task is not None and not task.done():
                await asyncio.wait({task}, timeout=grace_s)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._fail_waiting(cell, f"{cell.name} has stopped")
        if not self.failed.done():
            self.failed.cancel()

    async def _supervise(self, cell: _Cell) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                await self._live(cell)
                return
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and task.cancelling():
                    raise
                log.error(
                    "actor crashed", actor=cell.name, epoch=cell.epoch, error=repr(error), exc_info=True
                )
                if not self._restart(cell, f"{type(error).__name__}: {error}"):
                    return

    async def _live(self, cell: _Cell) -> None:
        actor = cell.factory()
        await actor.started()
        while True:
            try:
                envelope = await cell.mail.get()
            except MailboxClosed:
                return
            begin = self._loop.time()
            with self._answering(cell, envelope):
                result = await actor.handle(envelope.message)
                if envelope.reply is not None:
                    _answer(cell, envelope.reply, result)
            cell.handled += 1
            cell.busy_s += self._loop.time() - begin

    @contextlib.contextmanager
    def _answering(self, cell: _Cell, envelope: _Envelope) -> Iterator[None]:
        """Give the error of a handler to whoever asked; anything but a RegrowError also ends the actor."""
        try:
            yield
        except RegrowError as error:
            if envelope.reply is None:
                raise
            if not envelope.reply.done():
                envelope.reply.set_exception(error)
        except BaseException as error:
            if envelope.reply is not None and not envelope.reply.done():
                envelope.reply.set_exception(ActorDown(f"{cell.name} crashed: {error!r}"))
            raise

    def _restart(self, cell: _Cell, reason: str) -> bool:
        """Give the place a fresh mailbox and tell its watchers; False once the restart limit is exceeded."""
        self._fail_waiting(cell, f"{cell.name} crashed: {reason}")
        down = Down(cell.name, cell.epoch, reason)
        cell.epoch += 1
        now = self._loop.time()
        cell.crashes.append(now)
        while cell.crashes[0] < now - self.period_s:
            cell.crashes.popleft()
        if len(cell.crashes) > self.restarts:
            cell.mail.close()
            if not self.failed.done():
                times = f"{len(cell.crashes)} times within {self.period_s:g} s"
                self.failed.set_result(f"{cell.name} crashed {times}; last: {reason}")
            return False
        for name in cell.watchers:
            self.ref(name).post(down)  # the restart limit bounds how many there are
        return not self._stopping

    def _fail_waiting(self, cell: _Cell, reason: str) -> None:
        """Empty a mailbox; whoever waits for an answer from this life gets ActorDown."""
        for reply in cell.unanswered:
            if not reply.done():
                reply.set_exception(ActorDown(reason))
        for envelope in cell.mail.take_all():
            if envelope.reply is not None and not envelope.reply.done():
                envelope.reply.set_exception(ActorDown(reason))


def _answer(cell: _Cell, reply: asyncio.Future[object], result: object) -> None:
    """Answer an ask now, or when the future that its actor returned is done."""
    if isinstance(result, asyncio.Future):
        cell.unanswered[reply] = None
        reply.add_done_callback(cell.unanswered.pop)
        result.add_done_callback(functools.partial(_pass_on, reply))
    elif not reply.done():
        reply.set_result(result)


def _pass_on(reply: asyncio.Future[object], result: asyncio.Future[object]) -> None:
    error = None if result.cancelled() else result.exception()  # taken note of, also where nobody waits
    if reply.done():
        return
    if result.cancelled():
        reply.set_exception(ActorDown("the actor gave up before it answered"))
    elif error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(result.result())
