"""How a slot comes to hold the beginning of a prompt: park what would be lost, then mount from the source.

The parts of a slot's work that speak to the cache and the device before reading starts (S3 to S5, R4).
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from regrow.actors.disk_messages import (
    Restore,
    Save,
)
from regrow.actors.messages import (
    Admit,
    Lend,
    LetGo,
    Mount,
    Mounted,
    Park,
    Pin,
    Purge,
    Repay,
    SaveCells,
    Unpin,
    Verify,
)
from regrow.actors.parking import Loan
from regrow.actors.runtime import ActorRef, Ask
from regrow.actors.session import Session
from regrow.config import RootCells
from regrow.errors import ActorDown, DeviceFailed, RegrowError, VerifyFailed
from regrow.gpu.types import Geometry, HostCells
from regrow.models.detokenize import Detokenizer
from regrow.policy.directory import HolderId
from regrow.policy.request import Exactness

T = TypeVar("T")
RESTORE_S = 30.0  # a disk that needs longer is not waited for


class SourceGone(RegrowError):
    """The source of a mount is not what the placement took it for. touched: the slot is empty now (S4)."""

    def __init__(self, message: str, *, touched: bool = False) -> None:
        super().__init__(message)
        self.touched = touched


@dataclass(frozen=True, slots=True)
class SlotWiring:
    """What a slot is given: who to speak to, the model's geometry, and the settings it needs.

    detokenizer makes a fresh one for each answer; spell gives the bytes of one token. now is the engine clock
    in seconds. checkpoints: how many a session keeps. verify: read again what is mounted, and compare.
    debug_digest: tell with every answer a hash of what the slot holds.
    later: tells a slot something after a while; None where there is no disk tier. root_min: tokens of the
    shortest root; None where none are kept.
    """

    engine: ActorRef
    roots: ActorRef
    cache: ActorRef
    device: ActorRef
    geometry: Geometry
    detokenizer: Callable[[], Detokenizer]
    spell: Callable[[int], bytes]
    now: Callable[[], float]
    exact: Exactness
    checkpoints: int
    verify: bool
    debug_digest: bool
    root_cells: RootCells
    ask_deadline_s: float
    later: Callable[[int, object], None] | None = None
    root_min: int | None = None

    async def ask_cache(self, message: Ask[T], otherwise: T) -> T:
        """Ask the cache; a crash of it costs what it kept, never a running request."""
        try:
            return await self.cache.ask(message, self.ask_deadline_s)
        except RegrowError:
            return otherwise


async def park(wiring: SlotWiring, slot: int, session: Session, upto: int) -> None:
    """Park the session's first `upto` keys; skipped where there is no room (S3)."""
    what = session.parkable(slot, upto)
    if what is None:
        return
    granted = await wiring.ask_cache(Park(HolderId("slot", slot), what), None)
    if granted is not None:
        wiring.device.tell(SaveCells(slot, *granted))


async def save(wiring: SlotWiring, slot: int, session: Session, upto: int) -> None:
    """Offer the session's first `upto` keys to the disk tier (D5)."""
    what = session.parkable(slot, upto) if upto else None
    granted = await wiring.ask_cache(Save(HolderId("slot", slot), what), None)
    if granted is not None:
        wiring.device.tell(SaveCells(slot, *granted))


@asynccontextmanager
async def mount(
    wiring: SlotWiring, slot: int, session: Session, admit: Admit
) -> AsyncIterator[tuple[Mounted, int]]:
    """Make the slot hold the first `admit.resume` keys of the prompt; give what the device says, and the
    bytes that were copied.

    What the source has is kept until the end of the block, by when the slot holds what it needs of it, or the
    device does (S8).
    Raises SourceGone where the source is not what it was taken for: nothing was touched. Raises DeviceFailed.
    """
    position, holder, here = admit.resume, admit.holder, HolderId("slot", slot)
    source: int | tuple[HostCells, ...] | None = None
    loan: Loan | None = None
    taken = False
    state = None
    live = holder == here and session.live and position == session.length
    prefix = dict(zip(admit.prepared.plan.cuts, admit.prepared.hashes, strict=True)).get(position)
    pinned = prefix if position and wiring.geometry.hybrid and not live else None
    begin = wiring.now()
    if holder is not None and holder.kind == "disk":
        holder = await _restored(wiring, holder, position)
    restored_ms = (wiring.now() - begin) * 1e3
    try:
        if pinned is not None:
            state = await wiring.ask_cache(Pin(pinned), None)
            if state is None:
                pinned = None
                raise SourceGone("the state is gone")
        if position and holder is not None and holder != here:
            if holder.kind == "slot":
                source = int(holder.key)
            else:
                loan = await wiring.ask_cache(Lend(holder, position), None)
                if loan is None:
                    raise SourceGone(f"{holder.kind} {holder.key} is gone")
                source = loan.cells
        elif position and not session.begins(admit.prepared, position):
            raise SourceGone("the slot's session has changed")
        upto = session.resumable(hybrid=wiring.geometry.hybrid)
        if upto > (position if holder == here else 0):
            await park(wiring, slot, session, upto)  # it could be resumed past what stays (S3)
        wiring.cache.tell(LetGo(here, spans_above=position if holder == here else 0))
        reads = bool(admit.prepared.plan.chunks_from(position, wiring.exact))
        mounted = await _mounted(wiring, Mount(slot, position, source, state, reads))
        mounted = replace(mounted, ms=mounted.ms + restored_ms)
        if wiring.verify and position:
            await _verify(wiring, slot, admit)
        taken = loan is not None and loan.whole
        yield mounted, 0 if source is None else position * wiring.geometry.bytes_per_token
    finally:
        if loan is not None and holder is not None:
            wiring.cache.post(Repay(holder, here if taken else None))
        if pinned is not None:
            wiring.cache.post(Unpin(pinned))


async def _restored(wiring: SlotWiring, record: HolderId, position: int) -> HolderId:
    """Have a record brought into memory; return the parked conversation that it is now."""
    try:
        name = await wiring.cache.ask(Restore(record, position), min(RESTORE_S, wiring.ask_deadline_s))
    except RegrowError:
        name = None
    if name is None:
        raise SourceGone(f"record {record.key} could not be restored")
    return name


async def _verify(wiring: SlotWiring, slot: int, admit: Admit) -> None:
    """Compare what was mounted with reading it again; where it differs, nothing that shares it is kept."""
    prepared, position = admit.prepared, admit.resume
    chunks = tuple(pairwise([0, *(cut for cut in prepared.plan.cuts if cut <= position)]))
    parts = await wiring.device.ask(Verify(slot, prepared.keys[:position], chunks), wiring.ask_deadline_s)
    if parts:
        shared = zip(prepared.plan.cuts, prepared.hashes, strict=True)
        wiring.cache.tell(Purge(frozenset(prefix for cut, prefix in shared if cut <= position)))
        named = ", ".join(parts[:4])
        raise VerifyFailed(f"{len(parts)} parts of the mounted state differ from reading: {named}")


async def _mounted(wiring: SlotWiring, message: Mount) -> Mounted:
    try:
        return await wiring.device.ask(message, wiring.ask_deadline_s)
    except ActorDown as error:
        raise DeviceFailed(f"the device was restarted: {error}") from error
    except DeviceFailed:
        if message.source is None:
            raise
        raise SourceGone("the source's cells are not there any more", touched=True) from None
