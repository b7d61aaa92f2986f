"""The messages between the actors: frozen, typed, nouns or past facts.

Asks go only Engine -> Slot -> Root -> Cache -> Device; upward there are only tells. A running state is named
by the prefix hash at its position, a conversation and a root by a `HolderId`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regrow.actors.events import Divergence, Repacked, Usage
from regrow.actors.parking import Loan, Parkable
from regrow.actors.run import Run
from regrow.actors.runtime import Ask
from regrow.actors.shelf import Kept
from regrow.errors import RegrowError
from regrow.gpu.device_loop import DeviceEvent, Job
from regrow.gpu.pace import DeviceCounters
from regrow.gpu.types import Digest, HostCells, LogitsMask, Snapshot
from regrow.policy.checkpoints import system_end
from regrow.policy.directory import Holder, HolderId
from regrow.policy.explain import Miss, MissReason
from regrow.policy.keys import Keys, Namespace
from regrow.policy.ledger import Kind
from regrow.policy.place import Rates, Source
from regrow.policy.plan import ReadPlan
from regrow.policy.request import CacheUse, SamplingParams, StopRules


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the queue: rendered, tokenised, planned.

    hashes: the prefix hash at each cut of the plan. wanted: the cuts that should get a checkpoint (P3);
    protected: those of them that are not given up for newer ones (P5), among them the end of a pinned
    message.
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
    cache_salt: str | None
    priority: int
    deadline_s: float | None
    mask: LogitsMask | None = None
    thinks: bool = False
    prompt_logprobs: int | None = None
    repacked: Repacked | None = None

    def public(self, position: int) -> int:
        """Return how far a session that serves this from `position` on may be used by other requests (S9)."""
        if self.cache == "on":
            return sys.maxsize
        return max(position, system_end(self.plan)) if self.cache == "read-only" else position


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
class Holds(Ask[bool]):
    """To the engine, the cache and the disk: say whether any of these prefixes may be held, or is on its
    way."""

    prefixes: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Drain(Ask[None]):
    """To the engine: take no new work; answered when the last request has ended."""


@dataclass(frozen=True, slots=True)
class CutOff(Ask[None]):
    """To the engine: end every request now and take no new work; answered when the last has ended."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start. read and reused are prompt tokens, drawn are answer tokens. misses:
    how often not more could be reused, by reason."""

    finished: int = 0
    failed: int = 0
    read: int = 0
    reused: int = 0
    drawn: int = 0
    misses: Mapping[MissReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied into slots from one kind of source since the start, and how long it took."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The queue, what was served so far, and what was copied into slots, by source."""

    waiting: int
    running: int
    draining: bool
    totals: Totals
    rates: Rates
    copied: Mapping[Source, Copied]


@dataclass(frozen=True, slots=True)
class EngineStats(Ask[EngineReport]):
    """To the engine."""


@dataclass(frozen=True, slots=True)
class Admit:
    """To a slot: serve this request from its first `resume` keys, which `holder` has (the slot itself,
    another slot, a parked conversation or a root; None where nothing is reused).

    wanted: the cuts that should get a checkpoint, learned ones included (P3, P4). life: of the slot's actor
    that this was placed for.
    """

    request: str
    prepared: Prepared
    run: Run
    life: int
    resume: int
    source: Source
    holder: HolderId | None
    wanted: tuple[int, ...]
    why: Miss | None
    diverged: Divergence | None
    submitted_at: float


@dataclass(frozen=True, slots=True)
class WantCut:
    """To a slot that is reading: another request waits for the state at `position` (S6)."""

    request: str
    position: int


@dataclass(frozen=True, slots=True)
class Stale:
    """To the engine: slot or source were not what the placement took them for; plan again (S5)."""

    slot: int
    request: str


@dataclass(frozen=True, slots=True)
class MountEnded:
    """To the engine: the slot has what it needs from its source, which is free again. Sizes in bytes."""

    slot: int
    request: str
    source: Source
    copied: int
    ms: float


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """To the engine: what a slot holds now, as the directory keeps it.

    keys: what its cells hold (shared, read-only). live: its running state is the one at the end of them.
    reading: the request it serves is still being read. life: of the slot's actor that says so.
    """

    slot: int
    life: int
    holder: Holder
    namespace: Namespace | None
    keys: Keys
    live: bool
    reading: bool


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
    read_ms: float


@dataclass(frozen=True, slots=True)
class DeviceTicks:
    """To a slot: what the device did for it, in order."""

    events: tuple[DeviceEvent, ...]


@dataclass(frozen=True, slots=True)
class DigestRequest(Ask[Digest]):
    """To a slot: hash every part of the session it holds (V1). Refused while the device works on it."""


@dataclass(frozen=True, slots=True)
class ReserveStates(Ask[tuple[int | None, ...]]):
    """To the cache: room for running states, each (prefix hash, bytes, tokens it saves on average), answered
    at once: a lease, or 0 where the state is there already and is held for `holder` from now on, or None
    where there is no room, or only that of what saves more. With 0 bytes only what is there is wanted; with
    None for the tokens whatever may go makes room."""

    holder: HolderId
    wanted: tuple[tuple[bytes, int, float | None], ...]


@dataclass(frozen=True, slots=True)
class KeepState(Ask[bool]):
    """To the cache: fill a lease with the state of a prefix. False where the lease is gone. By the answer the
    engine has been told, so what waits for the state finds it."""

    lease: int
    prefix: bytes
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class LetGo:
    """To the cache: `holder` needs these states and leases no longer, nor retained spans ending above
    `spans_above`."""

    holder: HolderId
    prefixes: tuple[bytes, ...] = ()
    leases: tuple[int, ...] = ()
    spans_above: int | None = None


@dataclass(frozen=True, slots=True)
class Pin(Ask[Snapshot | None]):
    """To the cache: keep this state from eviction and hand it out, or None where it is gone."""

    prefix: bytes


@dataclass(frozen=True, slots=True)
class Unpin:
    prefix: bytes


@dataclass(frozen=True, slots=True)
class Park(Ask[tuple[HolderId, tuple[tuple[int, int], ...]] | None]):
    """To the cache: make room for the conversation in `slot`. Answered with its name and the ranges of cells
    to be copied, or None: kept already, or no room (S3: skipped, never fatal)."""

    slot: HolderId
    what: Parkable


@dataclass(frozen=True, slots=True)
class Parked:
    """To the cache: the ranges are copied; with `cells` None the copy failed and the conversation is lost."""

    name: HolderId
    cells: tuple[HostCells, ...] | None


@dataclass(frozen=True, slots=True)
class Lend(Ask[Loan | None]):
    """To the cache: the cells [0, position) of a parked conversation or root, guarded until `Repay`."""

    holder: HolderId
    position: int


@dataclass(frozen=True, slots=True)
class Repay:
    """To the cache: the loan is over. taker: the slot that the whole conversation has moved to (K2)."""

    holder: HolderId
    taker: HolderId | None


@dataclass(frozen=True, slots=True)
class Purge:
    """To the cache: a request failed with numbers that are not finite; drop all that shares these cuts."""

    prefixes: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Forget(Ask[int]):
    """To the cache: drop every parked conversation, root and state (or one root); answered with how many."""

    root: bytes | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """From the cache to a slot or the root actor: these states are gone."""

    prefixes: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """From the cache to the engine: what the directory should know."""

    states_added: frozenset[bytes]
    states_removed: frozenset[bytes]
    kept: tuple[Kept, ...]
    gone: tuple[HolderId, ...]


@dataclass(frozen=True, slots=True)
class ParkedReport:
    """One parked conversation: tokens, bytes that are its own, seconds since it was parked, uses."""

    name: str
    tokens: int
    nbytes: int
    age_s: float
    uses: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache holds: bytes by kind, the budget, entries; evictions by kind, refusals and copies that
    had changed in memory so far."""

    budget: int
    used: Mapping[Kind, int]
    peak: int
    states: int
    pinned: int
    spans: int
    parked: tuple[ParkedReport, ...]
    evictions: Mapping[str, int]
    refusals: int
    changed: int


@dataclass(frozen=True, slots=True)
class CacheStats(Ask[CacheReport]):
    """To the cache."""


@dataclass(frozen=True, slots=True)
class RootOffer:
    """To the root actor: the cells of `slot` below `position` are a system prompt (T1)."""

    prefix: bytes
    position: int


@dataclass(frozen=True, slots=True)
class RootTouch:
    """To the root actor: a request resumed at or past this system prompt."""

    prefix: bytes


@dataclass(frozen=True, slots=True)
class AddRoot:
    """From the root actor to the cache: keep what this root needs; again where it is used."""

    prefix: bytes
    position: int


@dataclass(frozen=True, slots=True)
class DropRoot:
    prefix: bytes


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root that is kept. age_s: seconds since it was first offered."""

    prefix: str
    tokens: int
    uses: int
    age_s: float


@dataclass(frozen=True, slots=True)
class RootStats(Ask[Sequence[RootReport]]):
    """To the root actor: what is kept, most recently used first."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """The slot holds the prefix; jobs for it carry `generation`."""

    generation: int
    ms: float


@dataclass(frozen=True, slots=True)
class Mount(Ask[Mounted]):
    """To the device: make `slot` hold its first `position` cells with the running state there (R4).

    source: the slot or the host cells to copy them from; None where the slot has them. reads: whether the
    slot reads a chunk next.
    """

    slot: int
    position: int
    source: int | tuple[HostCells, ...] | None
    state: Snapshot | None
    reads: bool


@dataclass(frozen=True, slots=True)
class SaveCells:
    """To the device: copy these ranges of a slot's cells for the parked conversation `name`; what overwrites
    them waits. The cache hears `Parked`."""

    slot: int
    name: HolderId
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EmptySlot:
    """To the device: what the slot holds is in doubt; nothing may be copied from it."""

    slot: int


@dataclass(frozen=True, slots=True)
class AlsoSnapshot:
    """To the device: copy the running state at `position` too, if the job has not come there yet."""

    slot: int
    epoch: int
    position: int


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
class Verify(Ask[tuple[str, ...]]):
    """To the device: read the keys of a mounted slot again in the spare one (V2); answered with the parts
    that differ."""

    slot: int
    keys: Keys
    chunks: tuple[tuple[int, int], ...]


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
    """One slot as `/v1/status` shows it: the tokens it holds; and of its request, where it has one: the
    tokens of the prompt, of it what was reused and how far it is read, and the answer so far."""

    slot: int
    phase: str
    request: str | None
    length: int
    checkpoints: tuple[int, ...]
    version: int
    prompt: int = 0
    reused: int = 0
    position: int = 0
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class SlotStats(Ask[SlotReport]):
    """To a slot."""
