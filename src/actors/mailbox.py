"""A mailbox: messages in their order for one reader, who waits while there are none.

Every token goes through one, so taking a message that is there costs next to nothing: no turn of the event
loop. After a row of messages without waiting the reader lets others have their turn.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
ROW = 16  # messages taken without a turn of the loop


class MailboxClosed(Exception):
    """Nothing goes in any more, or nothing is left."""


class Mailbox(Generic[T]):
    """Unbounded: who puts something in looks at `len` first."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self._row = 0

    def __len__(self) -> int:
        """How many messages wait: the one that a waiting reader is about to take does not."""
        return len(self._messages) - (self._reader is not None and bool(self._messages))

    def put(self, message: T) -> None:
        """Raises MailboxClosed."""
        if self._closed:
            raise MailboxClosed
        self._messages.append(message)
        self._wake()

    async def get(self) -> T:
        """Return the next message; raises MailboxClosed once it is closed and empty."""
        self._row += 1
        if self._row > ROW:
            self._row = 0
            await asyncio.sleep(0)
        while not self._messages:
            if self._closed:
                raise MailboxClosed
            self._row = 0
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._messages.popleft()

    def close(self) -> None:
        """Let nothing in any more; what is there can still be taken."""
        self._closed = True
        self._wake()

    def take_all(self) -> list[T]:
        """Return what is there, and leave nothing."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
