"""The engine actor alone, with slots that only listen: what it answers when messages cross on their way."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from regrow.actors.engine_actor import EngineActor, EngineWiring, LivingRequest
from regrow.actors.events import Event, Failed, Finished
from regrow.actors.messages import Admit, Cancel, Prepared, SessionChanged, Stale, Submit
from regrow.actors.prepare import Preparer
from regrow.actors.run import Run
from regrow.actors.runtime import ActorRef
from regrow.errors import DeadlineExceeded
from regrow.models.constrain import Grammars
from regrow.policy.directory import Holder, HolderId
from regrow.policy.keys import Namespace, as_keys
from regrow.policy.plan import ChunkTable
from regrow.policy.request import GenerateRequest
from tests.world.tokenizer import world_tokenizer


@dataclass
class Listener:
    """Stands for a slot; `told` is what the engine said to it."""

    name: str
    told: list[object] = field(default_factory=list)

    def tell(self, message: object) -> None:
        self.told.append(message)

    post = tell

    @property
    def admitted(self) -> list[Admit]:
        return [message for message in self.told if isinstance(message, Admit)]


class Desk:
    """An engine actor with `slots` listening slots, all empty and idle."""

    def __init__(self, slots: int = 1, queue: int = 8) -> None:
        self.slots = [Listener(f"slot-{i}") for i in range(slots)]
        self.requests: dict[str, LivingRequest] = {}
        self.versions = [0] * slots
        self.wiring = EngineWiring(
            slots=cast(list[ActorRef], self.slots),
            cancel=lambda request: None,
            expire=lambda request, error: None,
            now=asyncio.get_running_loop().time,
            explain=lambda prepared, position, sessions: (None, None),
            queue=queue,
            event_buffer=64,
            watch=lambda request, event: None,
            deadline_s=None,
            exact="cache",
            hybrid=True,
            bytes_per_state=0,
            bytes_per_token=64,
            chunk=64,
        )
        self.actor = EngineActor(self.wiring, self.requests)

    async def open(self) -> "Desk":
        await self.actor.started()
        for i in range(len(self.slots)):
            await self.changed(i)
        return self

    async def __call__(self, message: object) -> object:
        answer = await self.actor.handle(message)
        self.actor.check_integrity()
        return answer

    async def submit(self, text: str = "hello") -> Run:
        return cast(Run, await self(Submit(prepared(text))))

    async def changed(self, slot: int) -> None:
        """The slot says that it is idle and holds nothing, as a new version."""
        self.versions[slot] += 1
        version = self.versions[slot]
        holder = Holder(HolderId("slot", slot), version=version)
        await self(SessionChanged(slot, 0, holder, None, as_keys(()), live=False, reading=False))


def prepared(text: str) -> Prepared:
    prepare = Preparer(
        world_tokenizer(),
        ChunkTable.uniform(64),
        Namespace.of("test"),
        4096,
        6,
        0,
        Grammars(world_tokenizer()),
    )
    return prepare(GenerateRequest(prompt=text, max_tokens=4))


def at_desk(scenario: Callable[[Desk], Awaitable[None]], slots: int = 1) -> None:
    async def main() -> None:
        await scenario(await Desk(slots).open())

    asyncio.run(main())


async def events(run: Run) -> list[Event]:
    return [event async for event in run]


def test_a_placement_that_came_too_late_is_made_again() -> None:
    async def scenario(desk: Desk) -> None:
        run = await desk.submit()
        await desk.changed(0)
        await desk(Stale(0, run.id))
        assert [admit.request for admit in desk.slots[0].admitted] == [run.id, run.id]
        assert not run.ended

    at_desk(scenario)


def test_a_request_that_was_placed_too_late_goes_before_those_that_came_after_it() -> None:
    async def scenario(desk: Desk) -> None:
        first, _ = await desk.submit("first"), await desk.submit("second")
        await desk.changed(0)
        await desk(Stale(0, first.id))
        assert [admit.request for admit in desk.slots[0].admitted] == [first.id, first.id]

    at_desk(scenario)


def test_a_cancel_that_crosses_a_late_placement_is_not_lost() -> None:
    async def scenario(desk: Desk) -> None:
        for error in (None, DeadlineExceeded("too late")):
            run = await desk.submit()
            await desk(Cancel(run.id, error))
            await desk.changed(0)
            await desk(Stale(0, run.id))
            last = (await events(run))[-1]
            assert isinstance(last, Finished) if error is None else isinstance(last, Failed)
        assert len(desk.slots[0].admitted) == 2
        assert not desk.requests

    at_desk(scenario)
