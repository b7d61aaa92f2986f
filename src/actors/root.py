"""RootActor: which system prompts are kept apart from any conversation (T1). The bytes are CacheActor's."""

from collections import OrderedDict
from dataclasses import dataclass

from regrow.actors.messages import Evicted, RootOffer, RootReport, RootStats, RootTouch


@dataclass(slots=True)
class _Root:
    offer: RootOffer
    uses: int = 0


class RootActor:
    """Keeps the last `limit` roots of at least `minimum` tokens, one per distinct system prompt.

    The least recently made or used one leaves first. With a limit of 0 nothing is stored (T4).
    """

    def __init__(self, limit: int, minimum: int) -> None:
        self._limit = limit
        self._minimum = minimum
        self._roots: OrderedDict[bytes, _Root] = OrderedDict()

    async def started(self) -> None:
        """Nothing to do: roots are offered by the slots."""

    async def handle(self, message: object) -> object:
        match message:
            case RootOffer():
                self._offer(message)
            case RootTouch(key):
                if key in self._roots:
                    self._roots[key].uses += 1
                    self._roots.move_to_end(key)
            case Evicted(ids):
                for key in [k for k, root in self._roots.items() if root.offer.entry in ids]:
                    del self._roots[key]
            case RootStats():
                return tuple(
                    RootReport(key.hex(), r.offer.position, r.offer.entry, r.offer.slot, r.uses)
                    for key, r in reversed(self._roots.items())
                )
            case _:
                raise TypeError(f"the root actor does not know {type(message).__name__}")
        return None

    def _offer(self, offer: RootOffer) -> None:
        if not self._limit or offer.position < self._minimum:
            return
        uses = self._roots[offer.hash].uses if offer.hash in self._roots else 0
        self._roots[offer.hash] = _Root(offer, uses)
        self._roots.move_to_end(offer.hash)
        while len(self._roots) > self._limit:
            self._roots.popitem(last=False)

    def check_integrity(self) -> None:
        """Assert that no more roots are kept than allowed and none is too short (T1)."""
        assert len(self._roots) <= self._limit
        assert all(root.offer.position >= self._minimum for root in self._roots.values())
