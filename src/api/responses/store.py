"""Responses that can be fetched and continued: in memory, so many and so many bytes; the oldest leave."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from regrow.api.facts import Body
from regrow.api.port import Run
from regrow.api.responses.schema import Item

RESPONSES = 1000
BYTES = 256 << 20


@dataclass(slots=True)
class Kept:
    """A response. body: as the client is told it. history: the items of the conversation up to it, its own
    input and output included, be they shared with others or not; input: its own, as given. Sizes are those of
    JSON, in bytes. run: while it is being made."""

    body: Body
    input: Sequence[Item]
    history: Sequence[Item]
    body_bytes: int
    history_bytes: int
    run: Run | None = None

    @property
    def nbytes(self) -> int:
        return self.body_bytes + self.history_bytes


class ResponseStore:
    """`limit` responses of `limit_bytes` together, at most; what is larger alone is not kept."""

    def __init__(self, limit: int = RESPONSES, limit_bytes: int = BYTES) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, name: str, kept: Kept) -> None:
        """Keep a response as the newest, in the place of an earlier one of this name."""
        self.drop(name)
        self._kept[name] = kept
        self._bytes += kept.nbytes
        while len(self._kept) > self._limit or self._bytes > self._limit_bytes:
            self.drop(next(iter(self._kept)))

    def get(self, name: str) -> Kept | None:
        return self._kept.get(name)

    def drop(self, name: str) -> bool:
        """Forget a response; False where there is none."""
        kept = self._kept.pop(name, None)
        self._bytes -= 0 if kept is None else kept.nbytes
        return kept is not None


STORE = web.AppKey("responses", ResponseStore)
