"""`--repack-cold`: a conversation that no tier holds any more is read shortened; all others as they come.

Two slots and no room to park anything, unless a test says otherwise: two strangers push a conversation out.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from regrow.actors.disk_messages import WriteOut
from regrow.actors.events import Placed, Repacked
from regrow.actors.known_cold import ColdBook, Considered, KnownCold
from regrow.actors.threads import Threads
from regrow.config import EngineSettings
from regrow.errors import ActorDown, BadConfig, BadRequest
from regrow.policy.history import content_hash, prune, shortened
from regrow.policy.keys import Namespace
from regrow.policy.request import GenerateRequest
from regrow.store.clock import SteadyClock
from regrow.store.touches import STALE_S
from tests.actors.world import Answer, House, house
from tests.store.disk import SimulatedDisk
from tests.world.fake_runner import Costs
from tests.world.loop import VirtualLoop, run_world

TTL = 600.0
CHUNK = 1024
LONG = "\n".join(f"line {i} of a long output" for i in range(110))
SYSTEM = {"role": "system", "content": "You are one of several. " * 12}
ROOM = 1 << 22

Open = Callable[..., AbstractAsyncContextManager[House]]
Scenario = Callable[[VirtualLoop, Open], Awaitable[None]]


def agent(task: str = "Task", turns: int = 12, **options: Any) -> GenerateRequest:
    """A chat of an agent after so many tool calls, of which the second and the third gave long results."""
    messages: list[dict[str, object]] = [SYSTEM, {"role": "user", "content": f"{task}: do it well. " * 30}]
    for number in range(turns):
        call = {"id": f"{number}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        result = LONG if number in (1, 2) else f"result {number} of {task}"
        messages += [
            {"role": "assistant", "content": f"step {number}; " * 50, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"{number}", "content": result},
        ]
    return replace(GenerateRequest(messages=messages, max_tokens=2), **options)


def short(request: GenerateRequest) -> GenerateRequest:
    return replace(request, messages=prune(request.messages, 16).messages)


def in_world(scenario: Scenario, path: Path, seeds: int = 2) -> None:
    """Run a scenario that opens houses, one after the other, on one data directory."""
    for seed in range(seeds):
        data_dir = path / str(seed)

        async def lived(world: VirtualLoop, data_dir: Path = data_dir) -> None:
            def opened(**settings: Any) -> AbstractAsyncContextManager[House]:
                wanted: dict[str, Any] = {"repack_cold": True, "conversation_ttl": TTL, "budget": 0}
                wanted |= {"context": 1 << 15, "chunk": CHUNK, "root_min": 32, "data_dir": data_dir}
                return house(world, **(wanted | settings))

            await scenario(world, opened)

        run_world(seed, lived, time_limit=1e6)


async def ask(house: House, request: GenerateRequest) -> Answer:
    """Run a request; what may be read of it is known to the house in both shapes."""
    house._note(house.engine._prepare(short(request)))
    return await house.ask(request)


async def push_out(house: House) -> None:
    strangers = (replace(agent(f"Stranger {n}", 1), tools=[{"type": "function", "name": n}]) for n in "AB")
    await asyncio.gather(*(ask(house, stranger) for stranger in strangers))


def told(answer: Answer) -> Repacked | None:
    return answer.end.reuse.repacked


def tokens_of(house: House, request: GenerateRequest) -> int:
    return len(house.engine._prepare(request).keys)


async def lose(house: House, request: GenerateRequest) -> None:
    """Serve a conversation, push it out, and let it rest."""
    assert told(await ask(house, request)) is None
    await push_out(house)
    await asyncio.sleep(TTL)


def test_what_no_tier_holds_is_read_shortened_and_the_answer_says_so(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await lose(home, agent())
            answer = await ask(home, agent())
            removed = 2 * (len(LONG) - len(shortened(LONG)))
            assert told(answer) == Repacked("cold", 2, removed)
            assert answer.of(Placed)[0].prompt == tokens_of(home, short(agent()))
            assert answer.tokens == home.truth(short(agent()))
            assert await home.engine.original(content_hash(LONG)) == LONG
            assert await home.engine.original("0" * 24) is None
            report = (await home.engine.status()).repack
            assert report is not None
            assert (report.cold, report.sticky, report.latched) == (1, 0, 1)

    in_world(scenario, tmp_path)


def test_once_shortened_a_conversation_stays_so_and_goes_on_from_what_was_read(tmp_path: Path) -> None:  # C5
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened(budget=ROOM) as home:
            await ask(home, agent())
            await home.engine.forget()
            await push_out(home)
            await home.engine.forget()
            await asyncio.sleep(TTL)
            first = told(await ask(home, agent()))
            assert first is not None
            assert first.decision == "cold"
            longer = await ask(home, agent(turns=13))
            assert told(longer) == replace(first, decision="sticky")
            assert longer.reused > tokens_of(home, short(agent())) - CHUNK

    in_world(scenario, tmp_path)


def test_the_same_bytes_stand_for_a_message_after_a_restart(tmp_path: Path) -> None:  # C5, C8
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await lose(home, agent())
            first = await ask(home, agent())
        async with opened() as home:
            again = await ask(home, agent())
            assert told(again) == Repacked("sticky", 2, told(first).characters)  # type: ignore[union-attr]
            assert again.of(Placed)[0].prompt == first.of(Placed)[0].prompt
            assert again.tokens == first.tokens

    in_world(scenario, tmp_path)


def test_a_restart_loses_what_was_held_and_that_is_known(tmp_path: Path) -> None:  # C4, C8
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await ask(home, agent())
        async with opened() as home:
            await asyncio.sleep(TTL + STALE_S)
            assert told(await ask(home, agent())) is not None

    in_world(scenario, tmp_path)


@pytest.mark.parametrize("tier", ["slot", "parked"])
def test_what_a_tier_holds_is_read_as_it_comes_however_long_it_rested(tmp_path: Path, tier: str) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened(budget=ROOM) as home:
            await ask(home, agent())
            if tier == "parked":
                await push_out(home)
            await asyncio.sleep(100 * TTL)
            answer = await ask(home, agent())
            assert told(answer) is None
            assert answer.reused > tokens_of(home, agent()) - CHUNK

    in_world(scenario, tmp_path)


def test_what_is_on_disk_is_held_also_after_a_restart_and_a_crash(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        disk, prefixes = SimulatedDisk(), dict[bytes, int]()
        kept: dict[str, Any] = {"files": disk, "prefixes": prefixes, "budget": ROOM, "rests": False}
        async with opened(**kept) as home:
            await ask(home, agent())
        async with opened(**kept) as home:
            await asyncio.sleep(TTL + STALE_S)
            answer = await ask(home, agent())
            assert told(answer) is None
            assert answer.end.reuse.source in ("disk", "parked")
            await push_out(home)
            await home.engine.cache.ask(WriteOut(), 60)
            for name in ("cache", "disk"):
                await asyncio.sleep(2 * TTL)
                home.crash(name)
                run = await home.engine.submit(agent())
                events = [event async for event in run]
                assert events[-1].reuse.repacked is None  # type: ignore[union-attr]

    in_world(scenario, tmp_path)


def test_what_is_on_its_way_from_a_slot_is_held_at_every_moment(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened(slots=1, budget=ROOM, costs=Costs(copy=2**-10)) as home:
            await ask(home, agent())
            await asyncio.sleep(TTL)
            prefixes = home.engine._prepare.beyond_root(agent())
            blind = 0  # how often the directory alone would not have known
            run = None
            submitting = world.create_task(home.submit(agent("Other", 1)))
            while run is None or not run.ended:
                blind += not any(map(home.placement._directory.holds, prefixes))
                assert await home.engine._holds(prefixes)
                await asyncio.sleep(0 if run is None or blind < 50 else 2**-4)
                run = submitting.result() if submitting.done() else None
            assert blind > 10
            assert told(await ask(home, agent())) is None

    in_world(scenario, tmp_path, seeds=4)


def test_a_root_alone_is_no_conversation(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened(budget=ROOM, root_cells="always") as home:
            await ask(home, agent())
            await push_out(home)
            parked = home.cache._parking
            while parked.conversations:
                parked.drop(next(iter(parked.conversations)))
            home.cache._tell_changes()
            await asyncio.sleep(TTL)
            answer = await ask(home, agent())
            assert answer.end.reuse.source == "root"
            assert told(answer) is not None

    in_world(scenario, tmp_path)


def test_what_has_not_rested_for_longer_than_the_ttl_is_warm(tmp_path: Path) -> None:  # C4
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            run = await home.submit(agent())
            await home.ended(run)
            ended = world.time()
            await push_out(home)
            await asyncio.sleep(ended + TTL - 2**-10 - world.time())
            assert told(await ask(home, agent())) is None

    in_world(scenario, tmp_path)


def test_the_first_sighting_only_sets_the_baseline(tmp_path: Path) -> None:  # C4
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await asyncio.sleep(10 * TTL)
            assert told(await ask(home, agent())) is None

    in_world(scenario, tmp_path)


@pytest.mark.parametrize("use", ["off", "read-only"])
def test_a_request_that_keeps_nothing_decides_nothing(tmp_path: Path, use: Any) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            for _ in range(2):  # neither a first sighting, nor a last use
                assert told(await ask(home, agent(cache=use))) is None
                await asyncio.sleep(2 * TTL)
            await lose(home, agent())
            assert told(await ask(home, agent(cache=use))) is None
            kept = await ask(home, agent())
            assert told(kept) is not None
            answer = await ask(home, agent(cache=use))  # but its answer is that of the others (S9)
            assert answer.tokens == kept.tokens

    in_world(scenario, tmp_path)


def test_nobody_with_another_salt_learns_that_a_conversation_was_shortened(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await lose(home, agent(cache_salt="mine"))
            assert told(await ask(home, agent(cache_salt="mine"))) is not None
            assert told(await ask(home, agent(cache_salt="yours"))) is None

    in_world(scenario, tmp_path)


def test_a_short_conversation_is_left_alone(tmp_path: Path) -> None:  # C6
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await lose(home, agent(turns=4))
            assert told(await ask(home, agent(turns=4))) is None

    in_world(scenario, tmp_path)


def test_without_the_option_nothing_is_shortened_or_written(tmp_path: Path) -> None:  # C6
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened(repack_cold=False) as home:
            await lose(home, agent())
            assert told(await ask(home, agent())) is None
            assert (await home.engine.status()).repack is None
            assert await home.engine.original(content_hash(LONG)) is None

    in_world(scenario, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_refused_request_leaves_its_conversation_closed(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await ask(home, agent())
            with pytest.raises(BadRequest):
                await home.submit(agent(max_tokens=1 << 20))
            await push_out(home)
            await asyncio.sleep(TTL + 1)  # else it would be in use until now
            assert told(await ask(home, agent())) is not None

    in_world(scenario, tmp_path)


def test_a_client_that_leaves_while_it_submits_closes_its_conversation(tmp_path: Path) -> None:
    async def scenario(world: VirtualLoop, opened: Open) -> None:
        async with opened() as home:
            await ask(home, agent())
            for _ in range(8):
                submitting = world.create_task(home.engine.submit(agent()))
                for _ in range(world.rng.randrange(20)):
                    await asyncio.sleep(0)
                submitting.cancel()
                await asyncio.wait([submitting])
                if not submitting.cancelled():
                    await submitting.result().cancel()
            await asyncio.sleep(30)
            await push_out(home)
            await asyncio.sleep(TTL + 1)
            assert told(await ask(home, agent())) is not None

    in_world(scenario, tmp_path, seeds=4)


class Here:
    """Threads that are none."""

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()


def known_cold(path: Path, holds: Callable[[], bool], time: list[float]) -> KnownCold:
    """What decides, alone: every prompt has one cut, and `holds` says whether that is held."""

    async def asked(prefixes: frozenset[bytes]) -> bool:
        assert prefixes == {b"a cut"}
        return holds()

    clock = SteadyClock("boot", 0.0, lambda: time[0])
    book = ColdBook.open(EngineSettings(data_dir=path), Namespace.of("a model"), clock)
    return KnownCold(book, cast(Threads, Here()), lambda request: frozenset({b"a cut"}), asked)


async def decisions(known: KnownCold, time: list[float]) -> list[str | None]:
    """Ask three times, the second time after a long rest."""
    decided = []
    for time[0] in (0.0, TTL + 1, TTL + 2):
        considered = await known.consider(agent())
        known.ended(considered.key)
        decided.append(considered.repacked and considered.repacked.decision)
    return decided


def test_a_tier_that_cannot_be_asked_may_hold_it(tmp_path: Path) -> None:
    def down() -> bool:
        raise ActorDown("the cache was restarted")

    time = [0.0]
    lost, doubted = (known_cold(tmp_path / name, holds, time) for name, holds in (("a", bool), ("b", down)))
    assert asyncio.run(decisions(lost, time)) == [None, "cold", "sticky"]
    assert asyncio.run(decisions(doubted, time)) == [None, None, None]


def test_where_originals_cannot_be_kept_conversations_are_shortened_all_the_same(tmp_path: Path) -> None:
    time = [0.0]
    known = known_cold(tmp_path, bool, time)
    (tmp_path / "originals").rmdir()
    (tmp_path / "originals").touch()
    assert asyncio.run(decisions(known, time)) == [None, "cold", "sticky"]


@pytest.mark.parametrize("request_", [GenerateRequest(prompt="Hello"), GenerateRequest(messages=[SYSTEM])])
def test_what_is_no_conversation_is_left_alone(tmp_path: Path, request_: GenerateRequest) -> None:
    known = known_cold(tmp_path, bool, [0.0])
    considered = asyncio.run(known.consider(request_))
    assert considered == Considered(request_)


def test_two_engines_never_share_a_book(tmp_path: Path) -> None:
    settings = EngineSettings(data_dir=tmp_path)
    clock = SteadyClock("boot", 0.0, lambda: 0.0)
    first = ColdBook.open(settings, Namespace.of("a model"), clock)
    other = ColdBook.open(settings, Namespace.of("another model"), clock)
    with pytest.raises(BadConfig, match=f"--data-dir {tmp_path}: another server"):
        ColdBook.open(settings, Namespace.of("a model"), clock)
    first.close()
    ColdBook.open(settings, Namespace.of("a model"), clock).close()
    other.close()


def test_what_cannot_work_is_refused_at_start(tmp_path: Path) -> None:
    clock = SteadyClock("boot", 0.0, lambda: 0.0)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadConfig, match="Not a directory"):
        ColdBook.open(EngineSettings(data_dir=file), Namespace.of("a model"), clock)
    with pytest.raises(BadConfig, match="--repack-cold: not together with --cache off"):
        ColdBook.open(EngineSettings(cache=False), Namespace.of("a model"), clock)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_shortened_that_any_tier_holds_and_what_was_once_stays_so(
    tmp_path: Path, seed: int
) -> None:
    """Chats that come and go at random, with pauses, restarts, crashes and a small cache."""

    async def scenario(world: VirtualLoop, opened: Open) -> None:
        rng = Random(seed)
        latched: set[str] = set()
        turns = dict.fromkeys(("one", "two", "three"), 10)
        decided = 0
        for _ in range(3):
            async with opened(budget=rng.choice([0, 150_000, ROOM])) as home:
                await home.settled()
                for _ in range(12):
                    task = rng.choice(list(turns))
                    turns[task] += rng.randrange(2)
                    request = agent(task, turns[task])
                    held = holds(home, short(request) if task in latched else request)
                    decision = told(await ask(home, request))
                    if decision is not None and decision.decision == "cold":
                        assert not held
                        decided += 1
                    if task in latched:
                        assert decision is not None
                    if decision is not None:
                        latched.add(task)
                    await asyncio.sleep(rng.choice([0.0, TTL / 2, 2 * TTL]))
        assert decided

    in_world(scenario, tmp_path, seeds=1)


def holds(home: House, request: GenerateRequest) -> bool:
    """Look into every slot and all that is kept for anything of a conversation past its system prompt."""
    beyond = home.engine._prepare.beyond_root(request)
    slots = (home.slot(number).session.holder(number, 0, busy=False) for number in range(2))
    parked = (kept.holder for kept in home.cache._parking.conversations.values())
    return any(key in beyond for holder in (*slots, *parked) for _, key in holder.cuts)
