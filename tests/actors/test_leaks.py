"""Requests of every kind leave nothing behind: no task, no thread, no lease, no pin, no byte, no object."""

import asyncio
import gc
from collections import Counter
from random import Random

from regrow.actors.messages import CacheStats
from tests.actors.world import House
from tests.actors.world import house as open_house
from tests.long_form import many
from tests.sim.clients import Book, Crowd
from tests.store.disk import SimulatedDisk
from tests.world.loop import VirtualLoop, run_world

ROUNDS = many(60, long=5000)  # and a quarter of them before; 10,000 requests in the long form
AT_ONCE = 20
SLACK = 20  # objects of ours that may be more: what was learned, and caches of functions


def ours() -> Counter[str]:
    """Count the living objects of our own types."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("regrow."))


async def nothing_is_held(house: House) -> None:
    """Forget all that is kept on purpose, and see that nothing else is."""
    await asyncio.sleep(60)
    assert not house.requests
    await house.check()
    for number in range(len(house.engine.slots)):
        house.crash(f"slot-{number}")  # a session is kept on purpose too
    await asyncio.sleep(61)
    await house.engine.forget()
    await asyncio.sleep(60)
    await house.check()
    report = await house.engine.cache.ask(CacheStats(), 1)
    assert sum(report.used.values()) == 0, report.used
    assert (report.states, report.spans, report.pinned) == (0, 0, 0)
    assert not house.cache._shelf.leases
    assert not house.cache._shelf.guarded


def test_no_request_leaves_anything_behind_however_it_ends() -> None:
    async def scenario(house: House) -> None:
        crowd = Crowd(Random(house.world.rng.random()), Book(), house)

        async def live(rounds: int) -> Counter[str]:
            for _ in range(rounds):
                crowd.come()
                await asyncio.sleep(0.3)
                if len(crowd.at_work) > AT_ONCE:
                    await asyncio.wait(crowd.at_work)
            await asyncio.wait(crowd.at_work)
            crowd.raise_found()
            crowd.chats.clear()
            house.world.trace.clear()
            house.world._tasks.clear()
            await nothing_is_held(house)
            return ours()

        tasks, threads = len(asyncio.all_tasks()), len(house.world._threads)
        before = await live(ROUNDS // 4)
        after = await live(ROUNDS)
        assert crowd.book.started > ROUNDS
        assert sum((after - before).values()) <= SLACK, after - before
        assert len(asyncio.all_tasks()) <= tasks
        assert len(house.world._threads) <= threads + 1  # the worker's, once it had work

    async def lived(world: VirtualLoop) -> None:
        settings = {"slots": 3, "budget": 60_000, "root_min": 32, "event_buffer": 60, "rests": False}
        async with open_house(world, files=SimulatedDisk(), **settings) as opened:  # type: ignore[arg-type]
            await scenario(opened)

    run_world(1, lived, time_limit=1e6, step_limit=100_000_000)
