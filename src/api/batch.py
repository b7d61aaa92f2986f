"""The prompts of one request, side by side: at most AT_ONCE of them are with the engine, so that a long list
does not fill its queue."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from regrow.api.port import EnginePort, Run
from regrow.api.runs import submitted
from regrow.errors import BadRequest
from regrow.policy.request import GenerateRequest

AT_ONCE = 16

Follow = Callable[[int, Run], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests, of which the first AT_ONCE are taken by the engine. Made by `submitted_together`."""

    engine: EnginePort
    requests: Sequence[GenerateRequest]
    runs: Sequence[Run]

    async def each(self, follow: Follow) -> None:
        """Await follow(index, run) for every request; the first error ends the others and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self.runs)):
                    group.create_task(self._strand(index, follow))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _strand(self, index: int, follow: Follow) -> None:
        await follow(index, self.runs[index])
        for later in range(index + AT_ONCE, len(self.requests), AT_ONCE):
            async with _numbered(self.engine, self.requests, later) as run:
                await follow(later, run)


@asynccontextmanager
async def submitted_together(engine: EnginePort, requests: Sequence[GenerateRequest]) -> AsyncIterator[Batch]:
    """Runs that do not outlive their handler; raises what the engine refuses one of the first with."""
    async with AsyncExitStack() as stack:
        first = range(min(len(requests), AT_ONCE))
        runs = [await stack.enter_async_context(_numbered(engine, requests, index)) for index in first]
        yield Batch(engine, requests, runs)


@asynccontextmanager
async def _numbered(
    engine: EnginePort, requests: Sequence[GenerateRequest], index: int
) -> AsyncIterator[Run]:
    """The run of one request; an error that names the field `prompt` names which of several."""
    try:
        async with submitted(engine, requests[index]) as run:
            yield run
    except BadRequest as error:
        if error.param == "prompt" and len(requests) > 1:
            error.param = f"prompt[{index}]"
        raise
