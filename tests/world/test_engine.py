"""The whole engine above the device in the world: exact, the same way twice, true after every fault."""

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from structlog.testing import capture_logs

from regrow.actors.engine import Engine
from regrow.actors.events import Event, Failed, Finished, ReadProgress, Token
from regrow.actors.run import Run
from regrow.actors.runtime import ActorRef
from regrow.config import EngineSettings
from regrow.errors import DeadlineExceeded, DeviceFailed, NonFiniteLogits
from regrow.policy.checkpoints import last_start
from regrow.policy.plan import ChunkTable, build_plan
from regrow.policy.request import CacheUse, Exactness, GenerateRequest, SamplingParams
from tests.world.engine import CHUNK, engine_in, runner_in
from tests.world.fake_runner import FakeRunner, Hang, Operation
from tests.world.loop import VirtualLoop, run_world
from tests.world.tokenizer import world_tokenizer

SEEDS = range(3)
SYSTEM = {"role": "system", "content": "You are one of several. " * 12}


def chat(*contents: str, apart: object = "", **options: object) -> GenerateRequest:
    """A chat in which user and assistant take turns, under the common system prompt, or one that begins with
    `apart`, so that chats of two kinds share nothing."""
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    messages = [SYSTEM | {"content": f"{apart}{SYSTEM['content']}"}, *turns]
    return replace(GenerateRequest(messages=messages, max_tokens=6), **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep the log, with the traces of wanted crashes, out of the output."""
    with capture_logs():
        yield


@dataclass(frozen=True, slots=True)
class Answer:
    events: Sequence[Event]

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Token | Finished))

    @property
    def end(self) -> Finished | Failed:
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last


async def ask(engine: Engine, request: GenerateRequest) -> Answer:
    return Answer([event async for event in await engine.submit(request)])


def truth(runner: FakeRunner, request: GenerateRequest) -> list[int]:
    keys = world_tokenizer().encode_chat(request.messages)
    return runner.expected_answer(keys, request.max_tokens or 0, request.sampling)


def test_an_answer_takes_the_time_of_its_chunks_and_steps_and_no_more() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            answer = await ask(engine, chat("hello"))
        chunks = [what for _, what in world.trace if isinstance(what, tuple) and what[0] == "read"]
        read_s = sum(runner.costs.of_chunk(start, n) for _, _, start, n in chunks)
        assert answer.tokens == truth(runner, chat("hello"))
        assert answer.end.at == read_s + 5 * runner.costs.step

    for seed in SEEDS:
        run_world(seed, scenario)


@pytest.mark.parametrize("exact", ["full", "cache", "off"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention"])
@pytest.mark.parametrize("cache", ["on", "off"])
def test_every_turn_answers_as_if_it_were_read_from_the_start(
    exact: Exactness, hybrid: bool, cache: CacheUse
) -> None:
    async def scenario(world: VirtualLoop) -> list[int]:
        runner = runner_in(world, hybrid=hybrid)
        contents = ["first"]
        reused = []
        async with engine_in(world, runner, exact=exact) as engine:
            for turn in ("second", "third", "fourth"):
                request = chat(*contents, cache=cache)
                answer = await ask(engine, request)
                assert answer.tokens == truth(runner, request)
                reused.append(answer.end.usage.cached)
                contents += [answer.text, turn]
        return reused

    reused = run_world(0, scenario)
    assert reused[0] == 0
    assert (min(reused[1:]) > 300) == (cache == "on")


async def crowd(world: VirtualLoop, *, apart: bool = False) -> None:
    """Eight chats of three turns over two slots; some clients lose their patience. apart: they share nothing,
    so that nobody waits for what somebody else reads (S6)."""
    runner = runner_in(world)

    async def leave(run: Run, patience: float) -> None:
        await asyncio.sleep(patience)
        await run.cancel()

    async def client(number: int) -> None:
        rng = Random(number)  # the same chats in every world
        contents = [f"chat {number % 3}"]
        for turn in range(3):
            await asyncio.sleep(rng.random() * 3)
            sampling = SamplingParams(number % 2, seed=number)
            own = number if apart else ""
            request = chat(*contents, apart=own, max_tokens=1 + number, sampling=sampling, priority=turn)
            async with asyncio.TaskGroup() as group:
                run = await engine.submit(request)
                leaving = group.create_task(leave(run, rng.choice([0.2, 1.0, 100.0, 100.0])))
                answer = Answer([event async for event in run])
                leaving.cancel()
            assert answer.tokens == truth(runner, request)[: len(answer.tokens)]
            assert isinstance(answer.end, Finished)
            assert answer.end.reason == "cancelled" or len(answer.tokens) == request.max_tokens
            contents += [answer.text, f"turn {turn}"]

    async with engine_in(world, runner) as engine:
        await asyncio.gather(*map(client, range(8)))
        status = await engine.status()
    assert status.engine.waiting == 0
    assert [slot.request for slot in status.slots] == [None, None]
    assert status.cache.peak <= status.cache.budget


@pytest.mark.parametrize("apart", [False, True], ids=["one system prompt", "eight"])
def test_a_crowd_is_answered_exactly_under_every_seed(apart: bool) -> None:
    for seed in SEEDS:
        run_world(seed, functools.partial(crowd, apart=apart))


def test_the_same_seed_runs_the_whole_engine_the_same_way() -> None:
    async def traced(world: VirtualLoop) -> tuple[object, ...]:
        await crowd(world, apart=True)
        return tuple(world.trace)

    first = run_world(3, traced)
    assert run_world(3, traced) == first
    assert any(run_world(seed, traced) != first for seed in range(40))  # in most of them no race is lost


@pytest.mark.parametrize("operation", ["read", "step", "snapshot", "mount", "join", "leave"])
def test_a_device_error_ends_what_runs_and_the_next_request_is_served_afresh(operation: Operation) -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            await ask(engine, chat("hello"))
            runner.faults[operation, runner.counts[operation] + 1] = OSError("the bus fell off")
            broken = await ask(engine, chat("hello", "hm", "again"))
            assert isinstance(broken.end, Failed)
            assert isinstance(broken.end.error, DeviceFailed)
            after = await ask(engine, chat("hello"))
        assert after.tokens == truth(runner, chat("hello"))
        assert after.end.usage.cached == 0

    for seed in SEEDS:
        run_world(seed, scenario)


def test_logits_that_are_not_finite_end_their_request_alone_and_a_retry_reads_afresh() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            await ask(engine, chat("hello"))
            runner.nan_at.add((0, len(world_tokenizer().encode_chat(chat("hello").messages)) + 1))
            failing, healthy = await asyncio.gather(
                ask(engine, chat("hello", max_tokens=20)), ask(engine, chat("a neighbour"))
            )
            retry = await ask(engine, chat("hello"))
        assert isinstance(failing.end, Failed)
        assert isinstance(failing.end.error, NonFiniteLogits)
        assert healthy.tokens == truth(runner, chat("a neighbour"))
        assert retry.tokens == truth(runner, chat("hello"))
        assert retry.end.usage.cached == 0

    for seed in SEEDS:
        run_world(seed, scenario)


@pytest.mark.parametrize("leave_at", [ReadProgress, Token])
def test_a_client_that_leaves_frees_its_slot_within_a_chunk_or_step_and_a_retry_resumes_further(
    leave_at: type[Event],
) -> None:
    keys = world_tokenizer().encode_chat(chat("hello").messages)
    first_start = last_start(build_plan(keys, ChunkTable.uniform(CHUNK), world_tokenizer().marks))

    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world, slots=1)
        async with engine_in(world, runner) as engine:
            run = await engine.submit(chat("hello", max_tokens=200))
            left_at = 0.0
            async for event in run:
                if isinstance(event, leave_at) and not left_at:
                    left_at = world.time()
                    await run.cancel()
            assert isinstance(event, Finished)
            assert event.reason == "cancelled"
            assert event.at <= left_at + max(runner.costs.of_chunk(0, CHUNK), runner.costs.step)
            retry = await ask(engine, chat("hello"))
        assert retry.tokens == truth(runner, chat("hello"))
        assert retry.end.usage.cached >= (CHUNK if leave_at is ReadProgress else first_start)

    for seed in SEEDS:
        run_world(seed, scenario)


def test_a_request_beyond_the_slots_waits_and_is_told_so() -> None:
    async def scenario(world: VirtualLoop) -> list[int]:
        runner = runner_in(world)
        async with engine_in(world, runner, EngineSettings(chunk=CHUNK, queue=3)) as engine:
            answers = await asyncio.gather(*(ask(engine, chat("hello", apart=i)) for i in range(4)))
        return [answer.events[0].ahead for answer in answers]  # type: ignore[union-attr]

    for seed in SEEDS:
        assert sorted(run_world(seed, scenario)) == [0, 0, 0, 1]


CRASHING: dict[str, Callable[[Engine], ActorRef]] = {
    "engine": lambda engine: engine.engine,
    "cache": lambda engine: engine.cache,
    "roots": lambda engine: engine.roots,
    "device": lambda engine: engine.device,
    "slot": lambda engine: engine.slot(0),
}


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("name", CRASHING)
def test_an_actor_that_crashes_is_replaced_and_requests_are_served_again(name: str, busy: bool) -> None:
    long = chat("hello", "yes", "again", max_tokens=60)

    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world)
        async with engine_in(world, runner) as engine:
            await ask(engine, chat("hello"))
            running = asyncio.create_task(ask(engine, long))
            await asyncio.sleep(0.5 if busy else 20)
            CRASHING[name](engine).tell("something that no actor knows")
            during = await running
            assert during.tokens == truth(runner, long)[: len(during.tokens)]
            assert isinstance(during.end, Finished) == (not busy or name not in ("device", "slot"))
            answers = await asyncio.gather(*(ask(engine, chat(f"chat {i}")) for i in range(3)))
        for i, answer in enumerate(answers):
            assert isinstance(answer.end, Finished)
            assert answer.tokens == truth(runner, chat(f"chat {i}"))

    for seed in SEEDS:
        run_world(seed, scenario)


@pytest.mark.parametrize(("cache", "kept"), [("off", 0), ("read-only", 298), ("on", 311)])
def test_a_request_leaves_behind_what_it_allows(cache: CacheUse, kept: int) -> None:
    async def scenario(world: VirtualLoop) -> int:
        async with engine_in(world, runner_in(world)) as engine:
            first = await ask(engine, chat("hello", cache=cache))
            return (await ask(engine, chat("hello", first.text, "more"))).end.usage.cached

    assert run_world(0, scenario) == kept


def test_a_deadline_ends_a_request_in_the_queue_at_its_time_and_in_a_slot_after_the_chunk() -> None:
    async def scenario(world: VirtualLoop) -> None:
        runner = runner_in(world, slots=1)
        runner.faults["read", 2] = Hang(30.0)
        async with engine_in(world, runner) as engine:
            answers = await asyncio.gather(*(ask(engine, chat("hello", deadline_s=7.0)) for _ in range(2)))
            after = await ask(engine, chat("hello"))
        assert [answer.end.at for answer in answers] == [30 + 2 * runner.costs.of_chunk(0, CHUNK), 7.0]
        for answer in answers:
            assert isinstance(answer.end, Failed)
            assert isinstance(answer.end.error, DeadlineExceeded)
        assert after.tokens == truth(runner, chat("hello"))

    for seed in SEEDS:
        run_world(seed, scenario)
