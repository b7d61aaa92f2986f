"""Scrubbing: while nothing is served, what lies in host memory is read and its checksum taken; where that is
not what it was before, the copy has changed by itself, and all that shares it is dropped.

The first round notes the checksums, each further one compares. The bytes are read on the worker thread, a
tensor at a time; a request that comes waits for one tensor at most, and stops the round. What was changed
before its first round, or copied wrong, is found by reading again alone (`--verify reread`, V2).
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from regrow.actors.on_disk import bytes_of
from regrow.actors.runtime import ActorRef, Ask
from regrow.actors.shelf import Shelf, Span, SpanKey, State
from regrow.actors.threads import Threads
from regrow.errors import RegrowError
from regrow.store.record import checksum

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """What is to be read; it stays where it is until its `Checksums` come, or another one is asked for."""

    number: int
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class NextCopy(Ask[Copy | None]):
    """To the cache: name a copy to be read; None at the end of a round."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """To the cache: those of a copy's tensors."""

    number: int
    sums: tuple[str, ...]


class Scrub:
    """The cache's side of it: what is still to be read in this round, and the checksums of the last one.

    changed: copies that were found to differ.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.changed = 0
        self._shelf = shelf
        self._round: Iterator[bytes | SpanKey] | None = None
        self._sums: dict[int, tuple[str, ...]] = {}  # by lease: what has gone is not kept here
        self._at: tuple[int, bytes, State | Span] | None = None
        self._numbers = itertools.count((shelf.life << 32) + 1)  # never those of an earlier life

    def next(self) -> Copy | None:
        """Pin and return the next copy of the round; None at its end, then another one begins."""
        self._release()
        if self._round is None:
            states, spans = self._shelf.states, self._shelf.spans
            leases = {state.lease for state in states.values()} | {span.lease for span in spans.values()}
            self._sums = {lease: sums for lease, sums in self._sums.items() if lease in leases}
            self._round = itertools.chain(tuple(states), tuple(spans))
        for name in self._round:
            prefix, kept, tensors = self._there(name)
            if kept is not None and tensors and all(tensor.device.type == "cpu" for tensor in tensors):
                self._shelf.fix(kept)
                self._at = next(self._numbers), prefix, kept
                return Copy(self._at[0], tensors)
        self._round = None
        return None

    def came(self, checksums: Checksums) -> bytes | None:
        """Note the checksums of a copy, or compare them; return its prefix where it has changed."""
        if self._at is None or self._at[0] != checksums.number:
            return None  # of an earlier life
        _, prefix, kept = self._at
        self._release()
        if self._sums.setdefault(kept.lease, checksums.sums) == checksums.sums:
            return None
        self.changed += 1
        log.error("a copy in memory has changed", kind=type(kept).__name__.lower(), prefix=prefix.hex())
        return prefix

    def _there(self, name: bytes | SpanKey) -> tuple[bytes, State | Span | None, tuple[torch.Tensor, ...]]:
        """Return the prefix of a state or span, itself, and its tensors; none of what has gone meanwhile."""
        if isinstance(name, bytes):
            state = self._shelf.states.get(name)
            return name, state, () if state is None else state.snapshot.states
        span = self._shelf.spans.get(name)
        return name[1], span, () if span is None or span.cells is None else span.cells.tensors

    def _release(self) -> None:
        if self._at is None:
            return
        _, prefix, kept = self._at
        self._at = None
        if isinstance(kept, State):
            self._shelf.unpin(prefix)
        else:
            self._shelf.loosen(kept)


async def scrub(cache: ActorRef, threads: Threads, idle: Callable[[], bool], every_s: float) -> None:
    """Let rounds begin every `every_s` seconds, for ever; where that is 0, never."""
    while every_s:
        await asyncio.sleep(every_s)
        try:
            while idle() and (copy := await cache.ask(NextCopy(), every_s)) is not None:
                sums = [await threads.run(partial(_sum_of, tensor)) for tensor in copy.tensors]
                cache.post(Checksums(copy.number, tuple(sums)))
        except RegrowError as error:
            log.warning("what lies in memory was not checked", error=str(error))


def _sum_of(tensor: torch.Tensor) -> str:
    return checksum(bytes_of(tensor).data)
