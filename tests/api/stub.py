"""An engine with a script instead of a model: a run yields the script's events and waits at its holds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from regrow.actors.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Mounted,
    Placed,
    Queued,
    ReadDone,
    ReadProgress,
    Reuse,
    Token,
    Usage,
)
from regrow.config import EngineSettings
from regrow.errors import BadRequest, ContextLengthExceeded, Draining, RegrowError
from regrow.models.answer_reader import ThinkingTags
from regrow.policy.plan import ReadPlan
from regrow.policy.request import Exactness, GenerateRequest, JsonAnswer, SamplingParams, ToolFormat

REUSE = Reuse(
    source="checkpoint",
    slot=1,
    reused=64,
    read=36,
    queue_ms=1.26,
    mount_ms=2.0,
    read_ms=30.0,
    exact="cache",
    why="the system prompt changed at 'Current time: 15:09:34'",
)
USAGE = Usage(prompt=100, completion=3, cached=64)

QUEUED = Queued(at=0.0, ahead=2)
PLACED = Placed(at=1.0, slot=1, source="checkpoint", reused=64, prompt=100)
MOUNTED = Mounted(at=1.1, reused=64, ms=2.04)
PROGRESS = ReadProgress(at=1.2, position=80, reused=64, total=100, tokens_per_s=500.04, eta_ms=40.0)
READ = ReadDone(at=1.3, reused=64, read=36, ms=30.0)
TOKENS = (Token(1.4, 5, "Grüße"), Token(1.5, 6, ""), Token(1.6, 7, " dir"))


def finished(reason: FinishReason = "stop", text: str = "!") -> Finished:
    return Finished(2.0, reason, text, USAGE, REUSE)


def failed(error: RegrowError) -> Failed:
    return Failed(2.0, error, USAGE, REUSE)


WHOLE_LIFE = (QUEUED, PLACED, MOUNTED, PROGRESS, READ, *TOKENS, finished())
TEXT = "Grüße dir!"


@dataclass(frozen=True)
class Hold:
    """The run waits here until the gate opens or it is cancelled."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)


Script = Sequence[Event | Hold | Exception]
Watcher = Callable[[str, Event], None]


@dataclass(frozen=True)
class StubModel:
    name: str = "stub"
    context: int = 4096
    vocab_size: int = 1000
    exact: Exactness = "cache"
    created: int = 1_700_000_000
    default_sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.6, top_p=0.9)
    )
    has_template: bool = True
    tool_format: ToolFormat = "hermes"
    parallel_calls: bool = True
    thinking: ThinkingTags | None = None


class StubRun:
    def __init__(self, number: int, script: Script, watchers: Sequence[Watcher] = ()) -> None:
        self.id = f"run-{number}"
        self.slot = None
        self.thinks = False
        self.script = script
        self.watchers = watchers
        self.ended = False
        self.cancelled = asyncio.Event()
        self.waiting = asyncio.Event()

    async def cancel(self) -> None:
        if not self.ended:
            self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        for step in self.script:
            if self.cancelled.is_set():
                break
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Hold):
                self.waiting.set()
                waits = [asyncio.ensure_future(e.wait()) for e in (step.gate, self.cancelled)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                continue
            self.ended = isinstance(step, Finished | Failed)
            self.tell(step)
            yield step
        if not self.ended:
            self.ended = True
            self.tell(finished("cancelled", ""))
            yield finished("cancelled", "")

    def tell(self, event: Event) -> None:
        for watcher in self.watchers:
            watcher(self.id, event)


class StubEngine:
    """`script`: what every run does, or what runs do by the text of their prompt; a word counts as one token.

    A token is the number of letters of a word; the start token is 1. `plan`: of every prompt.
    """

    def __init__(
        self, script: Script | Mapping[str, Script] = WHOLE_LIFE, info: StubModel | None = None
    ) -> None:
        self.script = script
        self.plan = ReadPlan(0, ())
        self.info = info or StubModel()
        self.settings = EngineSettings()
        self.ready = True
        self.thinks = False
        self.conforming = True
        self.doing: object = {"slots": [{"slot": 0, "phase": "idle"}], "queue": {"waiting": 0}}
        self.requests: list[GenerateRequest] = []
        self.runs: list[StubRun] = []
        self.watchers: list[Watcher] = []
        self.refuse_with: RegrowError | None = None
        self.submitting = asyncio.Event()
        self.submit_gate = asyncio.Event()
        self.submit_gate.set()
        self.started: asyncio.Queue[StubRun] = asyncio.Queue()
        self.fails = asyncio.Event()
        self.drain_gate = asyncio.Event()
        self.drain_gate.set()

    async def submit(self, request: GenerateRequest) -> StubRun:
        if self.refuse_with is not None:
            raise self.refuse_with
        words = _words(request)
        if len(words) + (request.max_tokens or 1) > self.info.context:
            field = "messages" if request.messages else "prompt"
            raise ContextLengthExceeded(len(words), request.max_tokens, self.info.context, field)
        if not words:
            raise BadRequest("the prompt is empty", "prompt")
        self.submitting.set()
        await self.submit_gate.wait()
        self.requests.append(request)
        script = self.script[" ".join(words)] if isinstance(self.script, Mapping) else self.script
        run = StubRun(len(self.runs), script, self.watchers)
        run.thinks = self.thinks
        self.runs.append(run)
        self.started.put_nowait(run)
        return run

    def watch(self, watcher: Watcher) -> None:
        self.watchers.append(watcher)

    async def conforms(self, answer: JsonAnswer, text: str) -> bool:
        return self.conforming

    async def plan_of(self, request: GenerateRequest) -> tuple[Sequence[int], ReadPlan]:
        if isinstance(request.prompt, str) and request.add_special_tokens:
            return [1, *map(len, _words(request))], self.plan
        return [*map(len, _words(request))], self.plan

    async def text_of(self, tokens: Sequence[int]) -> str:
        if max(tokens, default=0) >= self.info.vocab_size:
            raise BadRequest("tokens: token ids are below 1000", "tokens")
        return " ".join("x" * token for token in tokens)

    async def render(self, request: GenerateRequest) -> str:
        shown = [f"{message['role']}: {message['content']}" for message in request.messages]
        return "\n".join([*shown, *map(str, request.tools), *map(str, request.template_options.items())])

    async def status(self) -> object:
        return self.doing

    async def original(self, name: str) -> str | None:
        return "Grüße" if name == "ab" else None

    async def cache_report(self) -> tuple[object, object, object]:
        return {"budget": 1024, "parked": []}, [{"prefix": "0a", "tokens": 300}], [{"name": "b"}]

    async def forget(self, root: str | None = None) -> int:
        return 3 if root is None else int(root == "0a")

    async def given_up(self) -> str:
        await self.fails.wait()
        return "device crashed 4 times within 60 s"

    async def drain(self) -> None:
        self.ready = False
        self.refuse_with = Draining("the server is shutting down")
        await self.drain_gate.wait()


def _words(request: GenerateRequest) -> list[str]:
    if request.messages:
        return [word for message in request.messages for word in str(message["content"]).split()]
    return request.prompt.split() if isinstance(request.prompt, str) else [*map(str, request.prompt or ())]
