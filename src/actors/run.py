"""One request as its client sees it: a stream of events that ends with exactly one terminal event.

The slot puts events in without ever waiting; the buffer is bounded. A client that falls more than the buffer
behind is cut off with `SlowConsumer`; its terminal event still arrives.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from regrow.actors.events import Event, Failed, Finished


class Run:
    """The life of one request. Iterate over it for its events; `slot` is set once it is placed. thinks: its
    prompt ends inside the model's thinking tags, so that the answer begins there."""

    def __init__(
        self,
        request: str,
        buffer: int,
        cancel: Callable[[str], None],
        watch: Callable[[str, Event], None],
    ) -> None:
        self.id = request
        self.slot: int | None = None
        self.thinks = False
        self._buffer = buffer
        self._events: deque[Event] = deque()
        self._terminal: Finished | Failed | None = None
        self._news = asyncio.Event()
        self._cancel = cancel
        self._watch = watch
        self._ended: Callable[[], None] = _nothing

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self._terminal is not None:
                yield self._terminal
                return
            self._news.clear()
            await self._news.wait()

    async def cancel(self) -> None:
        """Ask for an early end; the stream then ends with a terminal event. No effect after the end."""
        if self._terminal is None:
            self._cancel(self.id)

    @property
    def ended(self) -> bool:
        return self._terminal is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have `call` called at the end; at once where that was."""
        if self.ended:
            call()
        else:
            self._ended = call

    def put(self, event: Event) -> bool:
        """Give the client an event; False where its buffer is full and the event is lost."""
        self._watch(self.id, event)
        if len(self._events) >= self._buffer:
            return False
        self._events.append(event)
        self._news.set()
        return True

    def end(self, event: Finished | Failed) -> None:
        """Give the client its terminal event, once."""
        if self._terminal is not None:
            raise ValueError(f"request {self.id} has ended already")
        self._terminal = event
        self._watch(self.id, event)
        self._news.set()
        self._ended()


def _nothing() -> None:
    """Nobody asked to be called."""
