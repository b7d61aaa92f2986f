"""The disk tier under the engine, in virtual time (D1 to D5, B3, S1): what was idle is there after a kill, at
the price that was foreseen; what the disk cannot do is done without it, and said."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from regrow.actors.disk_messages import DiskReport, DiskStats
from regrow.actors.events import Finished, ReadProgress
from regrow.errors import BadConfig
from regrow.policy.request import GenerateRequest
from tests.actors.world import (
    SEEDS,
    Answer,
    House,
    chat,
    house,
    keys_of,
    raw,
    starts,
    system_end,
    text,
)
from tests.store.disk import SimulatedDisk
from tests.world.loop import VirtualLoop, run_world

T = TypeVar("T")
WITHIN_S = 2.0  # D5
KINDS = pytest.mark.parametrize("hybrid", [True, False])
FIRST = chat("hello, tell me of something long, with many words")
NEXT = chat("hello, tell me of something long, with many words", "well", "and what then?")
SIBLING = chat("quite another question")


class Home:
    """A disk, and one house after the other on it."""

    def __init__(self, world: VirtualLoop, **settings: Any) -> None:
        self.world = world
        self.disk = SimulatedDisk()
        self.settings = settings
        self.prefixes: dict[bytes, int] = {}

    def opened(self, **settings: Any) -> Any:
        chosen = {"rests": False, "files": self.disk, **self.settings, **settings}
        return house(self.world, prefixes=self.prefixes, **chosen)

    def killed(self, seed: int) -> None:
        """The power goes, and comes back."""
        self.disk = self.disk.power_cut(random.Random(seed))

    async def after(self, *requests: GenerateRequest, **settings: Any) -> None:
        """Live through these requests, and stop in order."""
        async with self.opened(**settings) as first:
            for request in requests:
                assert (await first.ask(request)).tokens == first.truth(request)


def in_homes(
    scenario: Callable[[Home], Awaitable[T]], seeds: Sequence[int] = SEEDS, **settings: Any
) -> list[T]:
    async def lived(world: VirtualLoop) -> T:
        return await scenario(Home(world, **settings))

    return [run_world(seed, lived) for seed in seeds]


async def report_of(house: House) -> DiskReport:
    return await house.engine.disk.ask(DiskStats(), 1)


async def answered(house: House, request: GenerateRequest) -> Answer:
    """Ask, and check that the answer is the one that the device gives to the prompt alone."""
    answer = await house.ask(request)
    assert answer.tokens == house.truth(request)
    return answer


@KINDS
def test_d5_what_is_idle_for_2_seconds_is_there_after_a_kill(hybrid: bool) -> None:
    async def scenario(home: Home) -> None:
        async with home.opened() as first:
            await answered(first, FIRST)
            await asyncio.sleep(WITHIN_S)
            home.killed(seed=1)
        async with home.opened() as second:
            answer = await answered(second, NEXT)
            assert answer.end.reuse.source == "disk"
            assert answer.reused == starts(FIRST)[-1]

    in_homes(scenario, hybrid=hybrid)


@KINDS
def test_d5_a_system_prompt_is_there_after_a_kill_although_its_prompt_is_still_being_read(
    hybrid: bool,
) -> None:
    async def scenario(home: Home) -> None:
        long = chat("word " * 600)
        async with home.opened() as first:
            run = await first.submit(long)
            seen = await first.until(run, ReadProgress, nth=20)
            home.killed(seed=1)
            await run.cancel()
            await first.ended(run, seen)
        async with home.opened() as second:
            answer = await answered(second, SIBLING)
            assert answer.end.reuse.source == "disk"
            assert answer.reused == system_end(SIBLING)
            assert set(second.cache._shelf.roots)  # it is a root again

    in_homes(scenario, hybrid=hybrid)


@KINDS
def test_after_a_restart_as_much_is_reused_as_without_one(hybrid: bool) -> None:
    async def scenario(home: Home) -> None:
        async with home.opened(files=None) as only:
            await answered(only, FIRST)
            without = [(await answered(only, request)).reused for request in (NEXT, SIBLING)]
        for request, reused in zip((NEXT, SIBLING), without, strict=True):
            home.disk = SimulatedDisk()
            await home.after(FIRST)
            async with home.opened() as second:
                answer = await answered(second, request)
                assert answer.reused >= 0.95 * reused > 0
                assert answer.end.reuse.source == "disk"

    in_homes(scenario, hybrid=hybrid)


@KINDS
def test_what_was_restored_is_in_memory_again_and_is_not_written_again(hybrid: bool) -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        async with home.opened(slots=3) as second:
            await answered(second, NEXT)
            answer = await answered(second, SIBLING)
            assert answer.end.reuse.source in ("slot", "parked", "root", "checkpoint")
            before = set(home.disk.names)
            await second.rests()
            assert before <= set(home.disk.names)
            report = await report_of(second)
            assert report.counters.restored == 1
        files = set(home.disk.names)
        await home.after(NEXT, SIBLING)
        assert set(home.disk.names) == files

    in_homes(scenario, hybrid=hybrid)


def test_two_that_want_one_record_at_once_have_it_read_once() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        async with home.opened() as second:
            runs = [await second.submit(chat(f"a question {n}")) for n in range(2)]
            answers = await asyncio.gather(*(second.ended(run) for run in runs))
            assert [answer.reused for answer in answers] == [system_end(SIBLING)] * 2
            assert (await report_of(second)).counters.restored == 1

    in_homes(scenario)


@KINDS
def test_shared_system_prompts_are_on_disk_once(hybrid: bool) -> None:
    async def scenario(home: Home) -> None:
        await home.after(*(chat(f"question {n}") for n in range(3)))
        heads = [name for name in home.disk.names if "-root-" in name]
        assert len(heads) == 1
        sizes = {name: facts.size for name, facts in home.disk.facts().items()}
        assert len(sizes) == 4
        assert all(size < sizes[heads[0]] for name, size in sizes.items() if name not in heads)

    in_homes(scenario, hybrid=hybrid)


@KINDS
def test_a_conversation_that_goes_on_is_written_as_what_is_new_and_its_older_record_is_not_a_source(
    hybrid: bool,
) -> None:
    async def scenario(home: Home) -> None:
        contents = ["hello"]
        async with home.opened() as first:
            for turn in range(5):
                answer = await answered(first, chat(*contents))
                await asyncio.sleep(WITHIN_S)
                contents += [answer.text or "-", f"and turn {turn}?"]
            report = await report_of(first)
            assert report.counters.records == 2  # the root and the conversation
            assert report.counters.written == 6

    in_homes(scenario, hybrid=hybrid)


def test_what_a_slot_gives_up_is_written_from_memory() -> None:
    async def scenario(home: Home) -> None:
        async with home.opened(slots=1) as first:
            await answered(first, FIRST)
            await answered(first, raw(text(3, 200)))  # at once: the first was not idle for long enough
            await asyncio.sleep(WITHIN_S)
            home.killed(seed=2)
        async with home.opened(slots=1) as second:
            assert (await answered(second, NEXT)).reused == starts(FIRST)[-1]
            assert (await answered(second, raw([*text(3, 200), 5, 5]))).end.reuse.source == "disk"

    in_homes(scenario)


@KINDS
def test_case_27_a_disk_that_is_slower_than_reading_is_left_alone(hybrid: bool) -> None:
    async def scenario(home: Home) -> None:
        second_per_byte = 2.0**-10

        def take_time(operation: str, size: int) -> None:
            if operation == "read" and size > 1000:
                home.world.sleep(second_per_byte * size)

        await home.after(FIRST, chat("hi", system=None), raw(text(9, 300)))
        home.disk.note = take_time
        async with home.opened(slots=1) as second:
            assert (await answered(second, raw([*text(9, 300), 1]))).end.reuse.source == "disk"
            answer = await answered(second, NEXT)
            assert answer.end.reuse.source == "none"
            assert "on disk, which failed or is slower" in (answer.end.reuse.why or "")
            assert (await report_of(second)).counters.restored == 1

    in_homes(scenario, hybrid=hybrid)


def test_a_read_is_not_waited_for_for_ever() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        async with home.opened() as second:
            home.disk.note = lambda operation, size: home.world.sleep(20 if operation == "read" else 0)
            answer = await answered(second, NEXT)
            assert answer.end.reuse.source == "none"
            await asyncio.sleep(900)
            home.disk.note = lambda operation, size: None
            await second.rests()

    in_homes(scenario)


@KINDS
def test_d2_a_broken_record_is_set_aside_and_named_and_the_answer_is_right(hybrid: bool) -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        (chat_file,) = [name for name in home.disk.names if "-chat-" in name]
        home.disk.names[chat_file].data[-1] ^= 1
        async with home.opened() as second:
            answer = await answered(second, NEXT)
            assert answer.reused in (0, system_end(NEXT))
            assert chat_file + ".broken" in home.disk.names
            report = await report_of(second)
            assert report.counters.set_aside == 1
            answer = await answered(second, SIBLING)
            assert answer.reused == system_end(SIBLING)
            await second.rests()

    in_homes(scenario, hybrid=hybrid)


def test_a_record_of_another_geometry_is_set_aside() -> None:
    """The identity should have kept it away; the shapes do where it does not."""

    async def scenario(home: Home) -> None:
        await home.after(FIRST, hybrid=False)
        async with home.opened(hybrid=True) as second:
            await second.engine.cache_report()
            answer = await answered(second, NEXT)
            assert answer.reused == 0

    in_homes(scenario)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_said_so_read_all_the_same_and_tried_again(error: int) -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        async with home.opened() as second:
            for operation in ("create", "write", "rename", "unlink", "touch", "sync", "sync names"):
                home.disk.fails[operation] = error
            assert (await answered(second, NEXT)).end.reuse.source == "disk"
            await asyncio.sleep(WITHIN_S)
            report = await report_of(second)
            assert report.counters.state == ("full" if error == errno.ENOSPC else "read only")
            assert report.counters.reason
            home.disk.fails.clear()
            await answered(second, raw(text(1, 100)))
            await asyncio.sleep(60)
            await answered(second, raw(text(2, 100)))
            await asyncio.sleep(WITHIN_S)
            report = await report_of(second)
            assert (report.counters.state, report.counters.reason) == ("on", "")
            await second.rests()
            home.killed(seed=1)
        async with home.opened() as third:  # what could not be written then was written since
            assert (await answered(third, NEXT)).reused == starts(NEXT)[-1]

    in_homes(scenario)


def test_a_full_budget_makes_room_of_what_was_used_longest_ago() -> None:
    async def scenario(home: Home) -> None:
        async with home.opened(slots=1, cache_disk_gib=30_000 / (1 << 30)) as first:
            for seed in range(8):
                await answered(first, raw(text(seed, 200)))
                await asyncio.sleep(WITHIN_S)
                report = await report_of(first)
                assert report.counters.used <= report.budget == 30_000
            await first.rests()
        async with home.opened() as second:
            assert (await answered(second, raw([*text(7, 200), 1]))).end.reuse.source == "disk"
            assert (await answered(second, raw([*text(0, 200), 1]))).end.reuse.source == "none"

    in_homes(scenario, hybrid=False)


def test_b1_what_does_not_fit_the_memory_is_neither_written_nor_restored_and_served_all_the_same() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST, raw(text(1, 900)))
        async with home.opened(budget=20_000) as second:
            assert (await answered(second, raw([*text(1, 900), 1]))).reused == 0
            await answered(second, NEXT)
            await answered(second, raw(text(2, 1500)))
            await asyncio.sleep(WITHIN_S)
            await second.rests()

    in_homes(scenario)
    in_homes(scenario, hybrid=False)


@pytest.mark.parametrize("name", ["disk", "cache", "engine", "slot-0", "roots", "device"])
@pytest.mark.parametrize("moment", [0.0, 2.0**-5, 1.0, 1.5])
def test_whatever_crashes_the_records_are_there_and_what_is_idle_is_written(name: str, moment: float) -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        async with home.opened() as second:
            run = await second.submit(NEXT)
            await asyncio.sleep(moment)
            second.crash(name)
            [event async for event in run]
            await asyncio.sleep(1)
            answer = await answered(second, NEXT)
            assert answer.reused >= system_end(NEXT) or name == "cache"
            await answered(second, raw(text(1, 100)))
            await asyncio.sleep(WITHIN_S)
            await second.rests()
        async with home.opened() as third:
            assert (await answered(third, NEXT)).reused >= starts(FIRST)[-1]
            assert (await answered(third, raw([*text(1, 100), 1]))).end.reuse.source == "disk"

    in_homes(scenario, seeds=range(2))


def test_what_shares_a_cut_with_numbers_that_are_not_finite_leaves_the_disk_too() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST, raw(text(1, 100)))
        async with home.opened() as second:
            second.runner.nan_at = {(slot, len(keys_of(NEXT)) - 2) for slot in range(2)}
            answer = await second.ask(NEXT)
            assert answer.reason == "NonFiniteLogits"
            await asyncio.sleep(1)
            second.runner.nan_at.clear()
            assert (await answered(second, NEXT)).reused == 0
            assert (await answered(second, raw([*text(1, 100), 1]))).end.reuse.source == "disk"

    in_homes(scenario)


def test_forgetting_forgets_the_disk_too() -> None:
    async def scenario(home: Home) -> None:
        async with home.opened() as first:
            await answered(first, FIRST)
            await asyncio.sleep(WITHIN_S)
            assert len(home.disk.names) == 2
            [root] = first.cache._shelf.roots
            assert await first.engine.forget(root.hex()) == 1
            await asyncio.sleep(1)
            assert len(home.disk.names) == 2  # the conversation needs it
            await first.engine.forget()
            await asyncio.sleep(1)
            assert home.disk.names == {}

    in_homes(scenario)


def test_a_root_that_no_conversation_needs_is_forgotten_on_disk() -> None:
    async def scenario(home: Home) -> None:
        async with home.opened() as first:
            run = await first.submit(chat("word " * 600))
            seen = await first.until(run, ReadProgress, nth=20)
            assert [name for name in home.disk.names if "-root-" in name]
            [root] = first.cache._shelf.roots
            assert await first.engine.forget(root.hex()) == 1
            await run.cancel()
            await first.ended(run, seen)
            assert not [name for name in home.disk.names if "-root-" in name]

    in_homes(scenario)


def test_s9_what_is_not_to_be_kept_is_not_written_and_salts_do_not_meet_on_disk() -> None:
    async def scenario(home: Home) -> None:
        await home.after(replace(FIRST, cache="off"))
        assert home.disk.names == {}
        await home.after(replace(FIRST, cache="read-only"))
        assert all("-root-" in name for name in home.disk.names)
        await home.after(replace(FIRST, cache_salt="mine"))
        async with home.opened() as second:
            assert (await answered(second, replace(NEXT, cache_salt="yours"))).reused == 0
            assert (await answered(second, replace(NEXT, cache_salt="mine"))).reused == starts(FIRST)[-1]

    in_homes(scenario)


def test_what_is_on_disk_is_listed_with_its_size_and_how_often_it_was_read_from() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        async with home.opened() as second:
            records = (await second.engine.cache_report())[2]
            assert {record.name for record in records} == set(home.disk.names)
            assert [(record.kind, record.uses) for record in records] == [("root", 0), ("chat", 0)]
            assert records[0].tokens == system_end(FIRST)
            assert sum(record.nbytes for record in records) == (await report_of(second)).counters.used
            await answered(second, NEXT)
            again = {record.name: record for record in (await second.engine.cache_report())[2]}
            assert again[records[1].name].uses == 1
            assert again[records[1].name].used_at >= records[1].used_at

    in_homes(scenario)


def test_without_a_cache_the_disk_is_left_alone() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        operations = home.disk.operations
        async with home.opened(cache=False, budget=0) as second:
            assert (await answered(second, NEXT)).reused == 0
            assert (await second.engine.status()).disk is None
        assert home.disk.operations == operations

    in_homes(scenario)


def test_a_client_that_goes_while_its_record_is_read_leaves_nothing_behind() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        home.disk.note = lambda operation, size: home.world.sleep(2.0**-6 if operation == "read" else 0)
        async with home.opened() as second:
            run = await second.submit(NEXT)
            await asyncio.sleep(2.0**-5)
            await run.cancel()
            answer = await second.ended(run)
            assert isinstance(answer.end, Finished)
            assert (await answered(second, NEXT)).reused >= starts(FIRST)[-1]
            await second.rests()

    in_homes(scenario)


def test_a_directory_that_cannot_be_read_at_all_ends_the_start() -> None:
    async def scenario(home: Home) -> None:
        await home.after(FIRST)
        home.disk.fails["read"] = errno.EMFILE
        with pytest.raises(BadConfig, match="--cache-dir"):
            async with home.opened():
                pass

    in_homes(scenario, seeds=[0])


@dataclass
class Person:
    """Somebody who goes on with chats at random; what was answered is right, or an actor was crashed."""

    rng: random.Random
    chats: list[list[str]] = field(default_factory=lambda: [["hello"]])
    restored: int = 0

    async def turn(self, house: House) -> None:
        rng, contents = self.rng, self.rng.choice(self.chats)
        if rng.random() < 0.3:
            contents = contents[: rng.randrange(1, len(contents) + 1, 2)]
            self.chats.append(contents)
        request = chat(*contents, max_tokens=rng.choice([1, 6]), cache_salt=rng.choice([None, None, "salt"]))
        run = await house.submit(request)
        if rng.random() < 0.2:
            house.leaves(run, rng.random())
        answer = await house.ended(run)
        if answer.reason in ("length", "stop", "cancelled"):
            truth = house.truth(request)
            assert answer.tokens == truth[: len(answer.tokens)]
            assert answer.reason == "cancelled" or len(answer.tokens) == len(truth)
        else:
            assert answer.reason == "ActorDown"
            assert house.crashed
        self.restored += answer.end.reuse.source == "disk"
        contents += [answer.text or "-", f"{rng.randrange(3)} " * rng.choice([1, 20, 60])]
        await asyncio.sleep(rng.choice([0, 0.5, 1.5, 3.0]))


@KINDS
def test_random_lives_with_kills_crashes_and_faults_of_the_disk_give_right_answers_only(hybrid: bool) -> None:
    """Chats go on and branch in several houses, each of which is killed or stopped; now and then the disk
    fails or has lost a bit, an actor crashes, a client goes."""

    async def scenario(home: Home) -> int:
        rng = home.world.rng
        person = Person(rng)
        for life in range(5):
            for content in list(home.disk.names.values()):
                if content.data and rng.random() < 0.1:
                    content.data[rng.randrange(len(content.data))] ^= 1 << rng.randrange(8)
            budget = rng.choice([40_000, 100_000, 1 << 20])
            async with home.opened(slots=rng.choice([1, 2, 3]), budget=budget) as opened:
                for _ in range(4):
                    home.disk.fails = {"write": errno.EIO} if rng.random() < 0.2 else {}
                    if rng.random() < 0.1:
                        name = rng.choice(["disk", "cache", "slot-0"])
                        opened.world.call_later(rng.random(), opened.crash, name)
                    await asyncio.gather(*(person.turn(opened) for _ in range(rng.choice([1, 2]))))
                if rng.random() < 0.5:
                    home.killed(seed=life)
                home.disk.fails = {}
        return person.restored

    assert sum(in_homes(scenario, seeds=range(8), hybrid=hybrid)) > 8
