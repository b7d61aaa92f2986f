"""The messages between the actors: frozen, typed, nouns or past facts.

Asks go only Engine -> Slot -> Root -> Cache -> Device; upward there are only tells. A lease id names bytes in
the ledger; once filled it is the id of the cache entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regrow.actors.events import Divergence, Usage
from regrow.actors.run import Run
from regrow.actors.runtime import Ask
from regrow.errors import RegrowError
from regrow.gpu.device_loop import DeviceCounters, DeviceEvent, Job
from regrow.gpu.types import Digest, LogitsMask, Snapshot
from regrow.policy.directory import Holder
from regrow.policy.keys import Keys, Namespace
from regrow.policy.ledger import Kind
from regrow.policy.place import Source
from regrow.policy.plan import ReadPlan
from regrow.policy.request import CacheUse, SamplingParams, StopRules


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the queue: rendered, tokenised, planned.

    hashes: the prefix hash at each cut of the plan. wanted: the cuts that should get a checkpoint (P3);
    protected: those of them that are not given up for newer ones (P5).
    """

    keys: Keys
    plan: ReadPlan
    namespace: Namespace
    hashes: tuple[bytes, ...]
    wanted: tuple[int, ...]
    protected: frozenset[int]
    sampling: SamplingParams
    stops: StopRules
    banned: frozenset[int]
    cache: CacheUse
    priority: int
    deadline_s: float | None
    mask: LogitsMask | None = None


@dataclass(frozen=True, slots=True)
class Submit(Ask[Run]):
    """To the engine: queue this request. Refused with Overloaded or Draining."""

    prepared: Prepared


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the engine, and from it to the slot: end this request. `error` None means the client asked."""

    request: str
    error: RegrowError | None = None


@dataclass(frozen=True, slots=True)
class Drain(Ask[None]):
    """To the engine: take no new work; answered when the last request has ended."""


@dataclass(frozen=True, slots=True)
class CutOff(Ask[None]):
    """To the engine: end every request now and take no new work; answered when the last has ended."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start. read and reused are prompt tokens, drawn are answer tokens."""

    finished: int = 0
    failed: int = 0
    read: int = 0
    reused: int = 0
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The queue and what was served so far."""

    waiting: int
    running: int
    draining: bool
    totals: Totals


@dataclass(frozen=True, slots=True)
class EngineStats(Ask[EngineReport]):
    """To the engine."""


@dataclass(frozen=True, slots=True)
class Admit:
    """To a slot: serve this request from `resume` on, chosen for `version` of the slot's session."""

    request: str
    prepared: Prepared
    run: Run
    version: int
    resume: int
    source: Source
    why: str | None
    diverged: Divergence | None
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Stale:
    """To the engine: the session has changed since the placement was made; plan again."""

    slot: int
    request: str


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """To the engine: what a slot holds now, as the directory keeps it.

    keys: what its cells hold (shared, read-only). live: its running state is the one at the end of them.
    """

    slot: int
    holder: Holder
    namespace: Namespace | None
    keys: Keys
    live: bool


@dataclass(frozen=True, slots=True)
class Distrust:
    """To the engine, and from it to every slot: a prompt with this first cut gave no finite logits; forget
    all that shares it."""

    position: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class NowServing:
    """To a new life of the engine: what this slot serves now, with all that was admitted before."""

    slot: int
    request: str | None


@dataclass(frozen=True, slots=True)
class RequestDone:
    """To the engine: the request is over and its slot is free. `read` prompt tokens were really read."""

    slot: int
    request: str
    failed: bool
    usage: Usage
    read: int


@dataclass(frozen=True, slots=True)
class DeviceTicks:
    """To a slot: what the device did for it, in order."""

    events: tuple[DeviceEvent, ...]


@dataclass(frozen=True, slots=True)
class DigestRequest(Ask[Digest]):
    """To a slot: hash every part of the session it holds (V1). Refused while the device works on it."""


@dataclass(frozen=True, slots=True)
class Reserve(Ask[tuple[int, ...]]):
    """To the cache: room for `sizes` bytes each, answered at once with a lease id for each that is granted,
    from the first on; the rest is refused. Leases belong to `owner` in its life `epoch`."""

    owner: str
    epoch: int
    kind: Kind
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """To the cache: fill a lease with a checkpoint; its id is the entry's id from now on."""

    lease: int
    namespace: Namespace
    snapshot: Snapshot
    saved: int


@dataclass(frozen=True, slots=True)
class Drop:
    """To the cache: give back leases and forget entries."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pin(Ask[Snapshot | None]):
    """To the cache: keep this entry from eviction and hand out its state, or None where it is gone."""

    entry: int


@dataclass(frozen=True, slots=True)
class Unpin:
    entry: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """From the cache: these entries are gone; chains and root lists forget them."""

    ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache holds: bytes by kind, the budget, entries, evictions and refusals so far."""

    budget: int
    used: Mapping[Kind, int]
    peak: int
    entries: int
    pinned: int
    evictions: int
    refusals: int


@dataclass(frozen=True, slots=True)
class CacheStats(Ask[CacheReport]):
    """To the cache."""


@dataclass(frozen=True, slots=True)
class RootOffer:
    """To the root actor: this entry is the state at the end of a system prompt (T1)."""

    namespace: Namespace
    hash: bytes
    position: int
    entry: int
    slot: int


@dataclass(frozen=True, slots=True)
class RootTouch:
    """To the root actor: a request resumed at or past this system prompt."""

    hash: bytes


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root that is kept."""

    hash: str
    tokens: int
    entry: int
    slot: int
    uses: int


@dataclass(frozen=True, slots=True)
class RootStats(Ask[Sequence[RootReport]]):
    """To the root actor: what is kept, most recently used first."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """The slot is cut back to the position; jobs for it carry `generation`."""

    generation: int
    ms: float


@dataclass(frozen=True, slots=True)
class Mount(Ask[Mounted]):
    """To the device: make `slot` hold its first `position` cells with the running state there (R4)."""

    slot: int
    position: int
    state: Snapshot | None


@dataclass(frozen=True, slots=True)
class Start:
    """To the device: read and decode."""

    job: Job


@dataclass(frozen=True, slots=True)
class Stop:
    """To the device: end the slot's job at the next chunk or step; `epoch` None means whichever it has."""

    slot: int
    epoch: int | None


@dataclass(frozen=True, slots=True)
class SlotDigest(Ask[Digest]):
    """To the device: hash what a slot holds."""

    slot: int


@dataclass(frozen=True, slots=True)
class DeviceBroke:
    """To the device actor itself: its loop met an error in this generation."""

    generation: int
    error: Exception


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The device's generation (one more after each restart) and counters."""

    generation: int
    counters: DeviceCounters


@dataclass(frozen=True, slots=True)
class DeviceStats(Ask[DeviceReport]):
    """To the device."""


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot as `/v1/status` shows it."""

    slot: int
    phase: str
    request: str | None
    length: int
    checkpoints: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class SlotStats(Ask[SlotReport]):
    """To a slot."""
