"""One row of the table of routes (`routes.py`)."""

from dataclasses import dataclass
from typing import Literal

from aiohttp.typedefs import Handler
from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Route:
    """path: as aiohttp writes it, {name} or {name:pattern}. body: what its JSON body is checked against.
    keyless: answered without a key, or it asks for one itself (a WebSocket, in its first message)."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    about: str
    body: type[Struct] | None = None
    keyless: bool = False
