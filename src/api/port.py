"""What the HTTP layer needs of an engine, and nothing more: it is built and tested against these protocols.

`Gate` stands between the routes and an engine that may still be loading.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from regrow.actors.events import Event
from regrow.api.metrics import Metrics
from regrow.api.recent import Recent
from regrow.config import EngineSettings
from regrow.errors import RegrowError
from regrow.models.answer_reader import ThinkingTags
from regrow.policy.plan import ReadPlan
from regrow.policy.request import Exactness, GenerateRequest, JsonAnswer, SamplingParams, ToolFormat


class ModelInfo(Protocol):
    """The served model: context in tokens, `exact` the mode that holds, `created` in unix seconds."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def exact(self) -> Exactness: ...
    @property
    def created(self) -> int: ...
    @property
    def default_sampling(self) -> SamplingParams: ...
    @property
    def has_template(self) -> bool: ...
    @property
    def tool_format(self) -> ToolFormat: ...
    @property
    def parallel_calls(self) -> bool: ...
    @property
    def thinking(self) -> ThinkingTags | None: ...


class Run(Protocol):
    """One request's life; iterating ends after `Finished` or `Failed`. thinks: the answer begins inside the
    model's thinking tags."""

    @property
    def id(self) -> str: ...
    @property
    def thinks(self) -> bool: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def cancel(self) -> None:
        """Ask for an early end; idempotent, no effect after the end."""
        ...


class EnginePort(Protocol):
    """An engine that has its model loaded. `ready` is False while it drains or its device restarts."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def settings(self) -> EngineSettings: ...

    @property
    def ready(self) -> bool: ...

    async def submit(self, request: GenerateRequest) -> Run:
        """Queue a request; raises BadRequest, ContextLengthExceeded, Overloaded or Draining."""
        ...

    async def conforms(self, answer: JsonAnswer, text: str) -> bool:
        """Whether the text of an answer is what it had to be."""
        ...

    async def plan_of(self, request: GenerateRequest) -> tuple[Sequence[int], ReadPlan]:
        """Return the tokens of a prompt, and where its reading would be cut; raises BadRequest."""
        ...

    async def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raises BadRequest for what is no id."""
        ...

    async def render(self, request: GenerateRequest) -> str:
        """Return the text of a chat's prompt; raises BadRequest."""
        ...

    async def status(self) -> object:
        """Return what the engine is doing, as a value that msgspec can encode to an object."""
        ...

    async def original(self, name: str) -> str | None:
        """Return a text that was left out of a conversation; None where there is none of that name."""
        ...

    async def cache_report(self) -> tuple[object, object, object]:
        """Return what the cache holds, the roots, and what is on disk, as values that msgspec can encode."""
        ...

    async def forget(self, root: str | None = None) -> int:
        """Drop one root, or all that is kept and not in use; raises BadRequest for what is no root's id."""
        ...

    def watch(self, watcher: Callable[[str, Event], None]) -> None:
        """Have every event of every run told to `watcher` when it happens, with the id of the run."""
        ...

    async def given_up(self) -> str:
        """Wait until the actor system has given up, and return why."""
        ...

    async def drain(self) -> None:
        """Take no new work; return when what runs has ended or was cut off."""
        ...


class StillLoading(RegrowError):
    """The model is not loaded yet."""


class Gate:
    """Holds the engine once it is loaded, and what is counted of it; the port answers before that."""

    def __init__(self) -> None:
        self.loaded: EnginePort | None = None
        self.metrics: Metrics | None = None
        self.recent = Recent()

    def open(self, engine: EnginePort, model: str) -> None:
        """Let requests through to `engine`, which is called `model`."""
        self.metrics = Metrics(model)
        engine.watch(self.metrics.heard)
        engine.watch(self.recent.heard)
        self.loaded = engine

    @property
    def engine(self) -> EnginePort:
        """Raises StillLoading until there is one."""
        if self.loaded is None:
            raise StillLoading("the model is still loading; /ready tells when it is done")
        return self.loaded

    @property
    def state(self) -> str:
        """ "loading", "ready", or "unavailable" while the engine drains or its device restarts."""
        if self.loaded is None:
            return "loading"
        return "ready" if self.loaded.ready else "unavailable"
