"""The cache actor: grants within its budget, keeps what a lease was filled with, and evicts for a reason."""

import asyncio
from typing import Any

import torch

from regrow.actors.cache import CacheActor
from regrow.actors.messages import CacheReport, CacheStats, Drop, Keep, Pin, Reserve, Unpin
from regrow.gpu.types import Snapshot
from regrow.policy.keys import Namespace

SPACE = Namespace.of("test")


def state(nbytes: int, position: int = 64) -> Snapshot:
    return Snapshot(position, (torch.zeros(nbytes, dtype=torch.uint8),))


class Cache:
    """The actor, spoken to without a runtime; `told` is what it said to others."""

    def __init__(self, budget: int = 100, life: int = 0) -> None:
        self.told: list[tuple[str, object]] = []
        self.actor = CacheActor(budget, life, lambda name, message: self.told.append((name, message)))

    def __call__(self, message: object) -> Any:
        answer = asyncio.run(self.actor.handle(message))
        self.actor.check_integrity()
        return answer

    def reserve(self, *sizes: int, owner: str = "slot-0", epoch: int = 0) -> tuple[int, ...]:
        leases: tuple[int, ...] = self(Reserve(owner, epoch, "checkpoint", sizes))
        return leases

    def keep(self, size: int, owner: str = "slot-0", saved: int = 64) -> int:
        (lease,) = self.reserve(size, owner=owner)
        self(Keep(lease, SPACE, state(size), saved))
        return lease

    @property
    def report(self) -> CacheReport:
        answer: CacheReport = self(CacheStats())
        return answer


def test_what_is_kept_can_be_pinned_until_it_is_dropped() -> None:
    cache = Cache()
    entry = cache.keep(40)
    assert cache(Pin(entry)).nbytes == 40
    cache(Unpin(entry))
    assert (cache.report.entries, cache.report.used["checkpoint"]) == (1, 40)
    cache(Drop((entry,)))
    assert cache(Pin(entry)) is None
    assert (cache.report.entries, cache.report.used["checkpoint"]) == (0, 0)


def test_an_id_of_an_earlier_life_is_unknown_and_never_anothers() -> None:
    earlier, later = Cache(life=0), Cache(life=1)
    old, new = earlier.keep(40), later.keep(40)
    later(Keep(old, SPACE, state(1), 64))
    later(Drop((old,)))
    later(Unpin(old))
    assert later(Pin(old)) is None
    assert later(Pin(new)).nbytes == 40
