"""When a provider's cached prefix has surely expired, so that a shorter one may be written (C1 to C9).

Pure: the clock is passed in, the book of touches is a value. `now` is in seconds on a line that never runs
faster than true time (`store/clock.py`). A prediction rests on what was sent and when, never on what a
response said (C9); every doubt means warm.

A latch names the messages that it shortens, by count and hash, and holds for every request that extends
exactly those. The messages behind them, at least eight, are not part of it: clients rewrite the end of a
chat from one turn to the next, users go back a few messages, and the prefix that was written at the cold
turn is still the one to hit then.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from regrow.policy.history import Message, boundary_of, prune

DEFAULT_TTL_S = 300.0
UNKNOWN_TTL_S = 86_400.0  # for a `ttl` that cannot be read
TTL = re.compile(r"(\d{1,6})([smhd])")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
CHARACTERS_A_TOKEN = 8  # more than real text has, so that a number of tokens is estimated too low (C6)
NOT_TEXT = frozenset({"data", "url", "signature"})  # long strings that are not read as text
CONVERSATIONS = 4096  # C7
LATCHES = 16  # of one conversation: its cold turns and branches, and chats that open as it does
SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits of C4 and C6. least_tokens: the least a prefix has, before and after shortening; a provider
    may ask for more."""

    margin: float = 2.0
    least_idle_s: float = 600.0
    least_tokens: int = 1024


RULES = Rules()


@dataclass(frozen=True, slots=True)
class Latch:
    """Messages [start, boundary) of what begins with these `count` messages are sent shortened (C5, C10)."""

    start: int
    boundary: int
    count: int
    digest: str
    used: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is known of one: its last touch, the longest TTL (seconds) that may still hold, its latches."""

    touched: float
    ttl: float
    latches: tuple[Latch, ...] = ()


Book = Mapping[str, Conversation]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request as the rules see it.

    key: C3; None where every message is a system message. opening: the hash of the first that is not one.
    head: hashes of tools and system, and a low estimate of their tokens. digests: one per message.
    cached: how many messages the provider was asked to cache (C1). ttl: for how many seconds (C2).
    """

    key: str | None
    opening: str | None
    head: tuple[str, str]
    messages: Sequence[Message]
    digests: tuple[str, ...]
    cached: int
    ttl: float | None
    head_tokens: int

    def prefix_tokens(self, messages: Sequence[Message]) -> int:
        """Return a low estimate of the tokens of tools, system and `messages`."""
        return self.head_tokens + _characters(messages) // CHARACTERS_A_TOKEN


def turn_of(
    messages: Sequence[Message],
    system: object = None,
    tools: object = None,
    *,
    cached: int | None = None,
    ttl: float | None = None,
) -> Turn:
    """Return a request as the rules see it. cached, ttl: for a prefix that the provider caches unasked."""
    digests = tuple(_hash(message) for message in messages)
    first = next((i for i, message in enumerate(messages) if message.get("role") not in SYSTEM), None)
    opening = None if first is None else digests[first]
    head = (_hash(tools), _hash([system, digests[:first]]))
    length = cached_prefix_len(messages) if cached is None else min(cached, len(messages))
    return Turn(
        key=None if opening is None else _hash([*head, opening]),
        opening=opening,
        head=head,
        messages=messages,
        digests=digests,
        cached=length,
        ttl=prefix_ttl(messages[:length], system, tools, ttl) if length else None,
        head_tokens=_characters([system, tools]) // CHARACTERS_A_TOKEN,
    )


def cached_prefix_len(messages: Sequence[Message]) -> int:
    """Return the number of messages up to and including the last one with a `cache_control` marker (C1)."""
    return max((i + 1 for i, message in enumerate(messages) if any(_markers(message))), default=0)


def prefix_ttl(
    messages: Sequence[Message], system: object = None, tools: object = None, least: float | None = None
) -> float:
    """Return the largest TTL (seconds) that the markers of a prefix name, and no less than `least` (C2)."""
    named = [_seconds(marker) for part in (messages, system, tools) for marker in _markers(part)]
    return max([*named, *([] if least is None else [least])], default=DEFAULT_TTL_S)


def is_cold(book: Book, turn: Turn, now: float, rules: Rules, provider_minimum: int = 0) -> bool:
    """Say whether the turn's cached prefix has surely expired and is worth shortening (C4, C6).

    Cold iff a prior touch exists, cached > 0 and idle > max(2 x TTL, 600 s), strictly. The first sighting
    only sets the baseline; a clock that went backwards counts as idle 0. provider_minimum: tokens under
    which the provider caches nothing.
    """
    seen = None if turn.key is None else book.get(turn.key)
    if seen is None or turn.ttl is None:
        return False
    limit = max(rules.margin * max(turn.ttl, seen.ttl), rules.least_idle_s)
    return now - seen.touched > limit and _is_tall(turn, max(rules.least_tokens, provider_minimum))


def is_known_cold(book: Book, turn: Turn, held: bool, now: float, rules: Rules = RULES) -> bool:
    """Say whether an engine has lost the turn's conversation, as `is_cold` does for a provider (C4, C6).

    held: it may still hold some of it past the system prompt. `turn.ttl` is how long a conversation rests, at
    least; the first sighting only sets the baseline.
    """
    seen = None if turn.key is None else book.get(turn.key)
    if held or seen is None or turn.ttl is None:
        return False
    return now - seen.touched > turn.ttl and _is_tall(turn, rules.least_tokens)


def repack_decision(
    book: Book, turn: Turn, now: float, rules: Rules = RULES, provider_minimum: int = 0
) -> tuple[bool, Book]:
    """Say whether the turn's old tool results are to be sent shortened; return the book with its touch."""
    return settle(book, turn, is_cold(book, turn, now, rules, provider_minimum), now)


def settle(book: Book, turn: Turn, cold: bool, now: float) -> tuple[bool, Book]:
    """Record a turn whose prefix is cold or not: its touch, and the latch that a cold turn sets (C5).

    Who *knows* that a prefix is gone, as an engine does of its own cache, says so here; no clock is asked.
    """
    if turn.key is None:
        return False, book
    seen = book.get(turn.key, Conversation(now, 0.0))
    latches = seen.latches
    if cold:
        boundary = boundary_of(len(turn.messages))
        latches = _added(latches, _latch(turn, 0, boundary, now))
    held = latches_of(latches, turn)
    latches = tuple(replace(latch, used=now) if latch in held else latch for latch in latches)
    ttl = turn.ttl or 0.0
    conversation = Conversation(max(seen.touched, now), ttl if cold else max(ttl, seen.ttl), latches)
    return bool(held) and turn.cached > 0, _kept({**book, turn.key: conversation})


def prune_decision(book: Book, turn: Turn, now: float) -> Book:
    """Latch the old messages behind the cached prefix, for `--prune` (C10); call it after `settle`."""
    if turn.key is None:
        return book
    seen = book[turn.key]
    boundary = boundary_of(len(turn.messages))
    held = latches_of(seen.latches, turn)
    if boundary <= max([turn.cached, *(latch.boundary for latch in held)]):
        return book
    start = min([turn.cached, *(latch.start for latch in held if latch.boundary >= turn.cached)])
    latch = _latch(turn, start, boundary, now)
    return {**book, turn.key: replace(seen, latches=_added(seen.latches, latch))}


def latches_of(latches: Iterable[Latch], turn: Turn) -> tuple[Latch, ...]:
    """Return the latches that hold for the turn: it extends exactly what they were set over (C3)."""
    return tuple(
        latch
        for latch in latches
        if latch.count <= len(turn.digests) and latch.digest == _hash(turn.digests[: latch.count])
    )


def left_out(before: Sequence[Message], after: Sequence[Message]) -> tuple[int, int]:
    """Return how many messages were shortened, and by how many characters together."""
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a is not b]
    return len(changed), sum(_characters(a) - _characters(b) for a, b in changed)


def touch(book: Book, uses: Mapping[str, float]) -> Book:
    """Record when prefixes were in use: the last byte of a response is a touch too (C4)."""
    known = {key: book[key] for key in uses if key in book}
    return {**book, **{key: replace(c, touched=max(c.touched, uses[key])) for key, c in known.items()}}


def merged(ours: Book, theirs: Book) -> Book:
    """Return both books in one: the later touch wins, latches are united (C8)."""
    both = dict(ours)
    for key, other in theirs.items():
        mine = both.get(key)
        both[key] = other if mine is None else _united(mine, other)
    return _kept(both)


def _united(a: Conversation, b: Conversation) -> Conversation:
    if a == b:
        return a
    latches = a.latches
    for latch in b.latches:
        latches = _added(latches, latch)
    return Conversation(max(a.touched, b.touched), max(a.ttl, b.ttl), latches)


def _kept(book: dict[str, Conversation]) -> Book:
    """Drop the conversations with the oldest touch until no more are left than may be tracked (C7)."""
    if len(book) <= CONVERSATIONS:
        return book
    youngest = sorted(book, key=lambda key: (book[key].touched, key))[-CONVERSATIONS:]
    return {key: book[key] for key in youngest}


def _latch(turn: Turn, start: int, boundary: int, now: float) -> Latch:
    """Return a latch over the messages that it shortens; over the whole turn where it shortens none."""
    count = boundary or len(turn.messages)
    return Latch(start, boundary, count, _hash(turn.digests[:count]), now)


def _added(latches: tuple[Latch, ...], new: Latch) -> tuple[Latch, ...]:
    """Add a latch, once; of too many, the one that was used least lately leaves."""
    same = [latch for latch in latches if replace(latch, used=new.used) == new]
    others = [latch for latch in latches if latch not in same]
    used = max([new.used, *(latch.used for latch in same)])
    ranked = sorted(
        [*others, replace(new, used=used)], key=lambda latch: (latch.used, latch.digest, latch.count)
    )
    return tuple(ranked[-LATCHES:])


def _is_tall(turn: Turn, least_tokens: int) -> bool:
    """Say whether the cached prefix has the least number of tokens, as it is and shortened (C6)."""
    prefix = turn.messages[: turn.cached]
    short = prune(prefix, boundary_of(len(turn.messages))).messages
    return turn.prefix_tokens(short) >= least_tokens  # shortening never makes it longer


def _seconds(marker: object) -> float:
    named = marker.get("ttl") if isinstance(marker, dict) else None
    if named is None:
        return DEFAULT_TTL_S
    match = TTL.fullmatch(named) if isinstance(named, str) else None
    return float(match[1]) * UNITS[match[2]] if match else UNKNOWN_TTL_S


def _markers(value: object) -> Iterable[object]:
    """Yield every `cache_control` of a message, its content blocks and what those contain, or of a list."""
    if isinstance(value, dict):
        if value.get("cache_control"):
            yield value["cache_control"]
        yield from _markers(value.get("content"))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _markers(inner)


def _hash(value: object) -> str:
    """Return a hash of a JSON value with every `cache_control` removed and object keys sorted (C3)."""
    text = msgspec.json.encode(_unmarked(value), order="deterministic")
    return hashlib.sha256(text).hexdigest()[:32]


def _unmarked(value: object) -> object:
    if isinstance(value, dict):
        return {key: _unmarked(inner) for key, inner in value.items() if key != "cache_control"}
    if isinstance(value, (list, tuple)):
        return [_unmarked(inner) for inner in value]
    return value


def _characters(value: object) -> int:
    """Return the length of all texts in a JSON value; pictures and signatures are not text."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(inner) for key, inner in value.items() if key not in NOT_TEXT)
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0
