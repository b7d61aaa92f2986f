"""The whole engine above the device, in a virtual world: `async with engine_in(world, runner) as engine`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from regrow.actors.engine import Engine
from regrow.actors.served import Served
from regrow.config import EngineSettings
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import Exactness, SamplingParams
from regrow.store.clock import SteadyClock
from regrow.store.files import Files
from tests.world.fake_runner import Costs, FakeRunner
from tests.world.loop import VirtualLoop
from tests.world.threads import VirtualThreads
from tests.world.tokenizer import EOS, VOCAB, WORDS, world_tokenizer

CHUNK = 64


def runner_in(
    world: VirtualLoop,
    *,
    slots: int = 2,
    context: int = 4096,
    hybrid: bool = True,
    costs: Costs = Costs(),  # noqa: B008  frozen
) -> FakeRunner:
    """Return a fake device with the time and the trace of the world and tokens that its tokenizer knows."""
    return FakeRunner(
        slots=slots,
        context=context,
        hybrid=hybrid,
        vocab=VOCAB,
        words=WORDS,
        eos=EOS,
        costs=costs,
        sleep=world.sleep,
        note=world.note,
    )


@asynccontextmanager
async def engine_in(
    world: VirtualLoop,
    runner: FakeRunner,
    settings: EngineSettings = EngineSettings(chunk=CHUNK, debug=True, scrub_s=0.0),  # noqa: B008  frozen
    *,
    exact: Exactness = "full",
    budget: int = 1 << 20,
    files: Files | None = None,
) -> AsyncIterator[Engine]:
    """Serve `runner` with a cache of `budget` bytes, and a disk tier on `files`."""
    served = Served(
        name="world",
        runner=runner,
        tokenizer=world_tokenizer(),
        table=ChunkTable.uniform(settings.chunk or CHUNK),
        namespace=Namespace.of("world", exact == "off"),
        exact=exact,
        default_sampling=SamplingParams(),
        budget=budget,
    )
    clock = SteadyClock("the world's", 0.0, world.time)
    threads = VirtualThreads(world)
    async with Engine.open(settings, served=served, threads=threads, clock=clock, files=files) as engine:
        yield engine
