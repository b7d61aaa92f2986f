"""Why a turn finds its prefix in the provider's cache, or not (C11): from hashes and idle time alone."""

from dataclasses import dataclass
from typing import Literal

from regrow.policy.cold_prefix import Turn

Cause = Literal["no prefix", "cold start", "warm reuse", "ttl lapse", "prefix change"]


@dataclass(frozen=True, slots=True)
class Sent:
    """The prefix that a chat sent last: hashes of its parts, its TTL, and its last use."""

    head: tuple[str, str]
    digests: tuple[str, ...]
    ttl: float
    touched: float

    @classmethod
    def of(cls, turn: Turn, now: float) -> "Sent":
        return cls(turn.head, turn.digests[: turn.cached], turn.ttl or 0.0, now)


@dataclass(frozen=True, slots=True)
class Attribution:
    """The cause, and where the prefix changed: "tools", "system" or "messages[i]"."""

    cause: Cause
    where: str | None = None


def attribute(before: Sent | None, turn: Turn, now: float) -> Attribution:
    """Compare a turn with what its chat, known by its first message, sent before."""
    if not turn.cached:
        return Attribution("no prefix")
    if before is None or not before.digests:
        return Attribution("cold start")
    if where := _change(before, turn):
        return Attribution("prefix change", where)
    return Attribution("ttl lapse" if now - before.touched > before.ttl else "warm reuse")


def _change(before: Sent, turn: Turn) -> str | None:
    for name, old, new in zip(("tools", "system"), before.head, turn.head, strict=True):
        if old != new:
            return name
    pairs = zip(before.digests, turn.digests, strict=False)
    return next((f"messages[{i}]" for i, (old, new) in enumerate(pairs) if old != new), None)
