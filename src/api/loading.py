"""Opens the engine off the event loop and shows how far the loading is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from regrow.config import EngineSettings

if TYPE_CHECKING:
    from regrow.actors.engine import Engine


class LoadingLine:
    """What is being done, as a live line; where the output is no terminal, a line for each new step.

    May be told from any thread.
    """

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._text = ""

    def __call__(self, text: str, share: float | None) -> None:
        if self._console.is_terminal:
            self._status.update(text if share is None else f"{text} {share:.0%}")
        elif text != self._text:
            self._console.print(text)
        self._text = text


@asynccontextmanager
async def open_engine(settings: EngineSettings, console: Console) -> AsyncIterator["Engine"]:
    """Open an engine; raises ModelRefused or BadConfig."""
    async with AsyncExitStack() as stack:
        with console.status("importing torch") as status:
            engine_type = await asyncio.to_thread(_engine_type)
            opening = engine_type.open(settings, progress=LoadingLine(console, status))
            engine = await stack.enter_async_context(opening)
        yield engine


def _engine_type() -> "type[Engine]":
    """Import torch and all that needs it: seconds, so on a thread."""
    from regrow.actors.engine import Engine

    return Engine
