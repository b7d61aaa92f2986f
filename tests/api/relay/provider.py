"""A fake provider with the real cache: what it bills for a request, as a function of the body and the time.

Prefix match by marker: an entry is written at every marked place of a prompt (tools, system, messages, block
by block), and found again from a marked place or up to 20 blocks before one. Using an entry refreshes its
life. A prefix under the minimum is neither written nor read. A token is four characters of text, billed as
read (0.1), written (1.25, or 2 for an hour) or fresh (1).

A provider promises that an entry lives for its TTL, not that it is gone then. `lingering` says how much
longer one may live, as a part of the TTL: drawn for each use, or always all of that.
"""

import hashlib
import itertools
import random
from dataclasses import dataclass, field, replace

import msgspec

TTL_S = {"5m": 300.0, "1h": 3600.0}
WRITE = {"5m": 1.25, "1h": 2.0}
READ = 0.1
LOOKBACK = 20
CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True)
class Bill:
    """Tokens of one request's prompt, by how they are billed."""

    fresh: int = 0
    read: int = 0
    written_5m: int = 0
    written_1h: int = 0

    @property
    def cost(self) -> float:
        """In tokens of fresh input."""
        return self.fresh + READ * self.read + WRITE["5m"] * self.written_5m + WRITE["1h"] * self.written_1h

    @property
    def tokens(self) -> int:
        return self.fresh + self.read + self.written_5m + self.written_1h


@dataclass(frozen=True)
class Block:
    """One block of a prompt: its hash, tokens, and the TTL of its marker, if any."""

    digest: bytes
    tokens: int
    marker: str | None


class Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    system: object = None
    tools: object = None


@dataclass
class Cache:
    """The provider's prompt cache of one account."""

    minimum: int = 1024
    lingering: float = 0.0
    drawn: bool = True
    seed: int = 0
    entries: dict[bytes, float] = field(default_factory=dict)
    known: dict[bytes, list[Block]] = field(default_factory=dict)

    def copy(self) -> "Cache":
        """Return another account's cache that has seen the same requests."""
        return replace(self, entries=dict(self.entries))

    def bill(self, body: bytes, now: float, ended: float | None = None) -> Bill:
        """Bill a request that came at `now`; its use of the cache lasts until `ended`."""
        blocks, places = self._places(body)
        marked = [i for i, block in enumerate(blocks) if block.marker]
        if not marked:
            return Bill(fresh=places[-1][1])
        used = now if ended is None else ended
        found = max(self._found(places, i, now) for i in marked)
        read = reach = places[found][1] if found >= 0 else 0
        if found >= 0:
            self._use(places[found][0], blocks[found].marker or "5m", used, -1)
        written = dict.fromkeys(TTL_S, 0)
        for number, i in enumerate(marked):
            digest, tokens = places[i]
            ttl = blocks[i].marker or "5m"
            if tokens < self.minimum:
                continue
            written[ttl] += max(0, tokens - reach)
            reach = max(reach, tokens)
            self._use(digest, ttl, used, number)
        return Bill(places[-1][1] - reach, read, written["5m"], written["1h"])

    def _found(self, places: list[tuple[bytes, int]], marked: int, now: float) -> int:
        for i in range(marked, max(-1, marked - LOOKBACK - 1), -1):
            if self.entries.get(places[i][0], -1.0) >= now:
                return i
        return -1

    def _use(self, digest: bytes, ttl: str, at: float, number: int) -> None:
        """How long an entry lives is drawn by time and place of its use: the same for a shorter prompt."""
        drawn = random.Random(f"{self.seed} {at} {number}").random() if self.drawn else 1.0
        life = TTL_S[ttl] * (1 + self.lingering * drawn)
        self.entries[digest] = max(self.entries.get(digest, 0.0), at + life)

    def _places(self, body: bytes) -> tuple[list[Block], list[tuple[bytes, int]]]:
        """Return the prompt's blocks, and for each the hash and length of the prompt up to its end."""
        request = msgspec.json.decode(body, type=Request)
        blocks = [_block("tools", tool) for tool in _listed(request.tools)]
        blocks += [_block("system", part) for part in _listed(request.system)]
        for raw in request.messages:
            message = bytes(raw)
            if message not in self.known:
                self.known[message] = list(_message_blocks(msgspec.json.decode(message)))
            blocks += self.known[message]
        chain, tokens = hashlib.blake2b(request.model.encode(), digest_size=16), 0
        places = []
        for block in blocks:
            chain.update(block.digest)
            tokens += block.tokens
            places.append((chain.digest(), tokens))
        return blocks, places


def _message_blocks(message: dict) -> "itertools.chain[Block]":
    parts = _listed(message["content"])
    return itertools.chain(_block(message["role"], part) for part in parts)


def _listed(value: object) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [{"type": "text", "text": value}]


def _block(role: str, part: dict) -> Block:
    marker = None
    nested = part.get("content")
    for item in [part, *(nested if isinstance(nested, list) else [])]:
        if item.get("cache_control"):
            marker = item["cache_control"].get("ttl", "5m")
    text = msgspec.json.encode([role, _bare(part)])
    return Block(
        hashlib.blake2b(text, digest_size=16).digest(), max(1, _size(part) // CHARACTERS_A_TOKEN), marker
    )


def _bare(value: object) -> object:
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if k != "cache_control"}
    return [_bare(v) for v in value] if isinstance(value, list) else value


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(v) for k, v in value.items() if k not in ("type", "cache_control"))
    return sum(map(_size, value)) if isinstance(value, list) else 0
