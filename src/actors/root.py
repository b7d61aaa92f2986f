"""RootActor: which system prompts are kept apart from any conversation (T1). The bytes are CacheActor's."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from regrow.actors.messages import AddRoot, DropRoot, Evicted, RootOffer, RootReport, RootStats, RootTouch
from regrow.actors.runtime import ActorRef, Down


@dataclass(slots=True)
class _Root:
    position: int
    offered_at: float
    uses: int = 0


class RootActor:
    """Keeps the last `limit` roots of at least `minimum` tokens, one per distinct system prompt.

    The least recently made or used one leaves first. With a limit of 0 nothing is stored (T4). now: the
    engine clock in seconds.
    """

    def __init__(self, limit: int, minimum: int, cache: ActorRef, now: Callable[[], float]) -> None:
        self._limit = limit
        self._minimum = minimum
        self._cache = cache
        self._now = now
        self._roots: OrderedDict[bytes, _Root] = OrderedDict()

    async def started(self) -> None:
        """Nothing to do: roots are offered by the slots."""

    async def handle(self, message: object) -> object:
        match message:
            case RootOffer(prefix, position):
                self._offer(prefix, position)
            case RootTouch(prefix):
                if prefix in self._roots:
                    self._roots[prefix].uses += 1
                    self._roots.move_to_end(prefix)
                    self._cache.tell(AddRoot(prefix, self._roots[prefix].position))
            case Evicted(prefixes):
                for prefix in prefixes:
                    self._roots.pop(prefix, None)
            case Down():
                for prefix, root in self._roots.items():  # the cache has forgotten them
                    self._cache.tell(AddRoot(prefix, root.position))
            case RootStats():
                now = self._now()
                return tuple(
                    RootReport(prefix.hex(), root.position, root.uses, now - root.offered_at)
                    for prefix, root in reversed(self._roots.items())
                )
            case _:
                raise TypeError(f"the root actor does not know {type(message).__name__}")
        return None

    def _offer(self, prefix: bytes, position: int) -> None:
        if not self._limit or position < self._minimum:
            return
        if prefix not in self._roots:
            self._roots[prefix] = _Root(position, self._now())
            self._cache.tell(AddRoot(prefix, position))
        self._roots.move_to_end(prefix)
        while len(self._roots) > self._limit:
            gone, _ = self._roots.popitem(last=False)
            self._cache.tell(DropRoot(gone))

    def check_integrity(self) -> None:
        """Assert that no more roots are kept than allowed and none is too short (T1)."""
        assert len(self._roots) <= self._limit
        assert all(root.position >= self._minimum for root in self._roots.values())
