"""Request bodies in the two styles: what the rules need to know of them, and how messages are replaced.

What is not replaced keeps its bytes: members and messages are spliced, not written again.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from regrow.api.relay.prices import Price
from regrow.policy.cold_prefix import Turn, prefix_ttl, turn_of
from regrow.policy.history import Message

Style = Literal["anthropic", "openai"]
PATHS: dict[Style, re.Pattern[str]] = {
    "anthropic": re.compile(r".*/messages"),
    "openai": re.compile(r".*/chat/completions"),
}
IN_MEMORY_S = 3600.0
LIMIT_BYTES = 64 * 1024 * 1024  # of a body that is looked into, decompressed


class Unreadable(Exception):
    """The body is not one that the rules know; it is passed on as it is."""


def style_of(method: str, path: str, chosen: Style | None) -> Style | None:
    """Return in which style a request's body is, if it is one that the rules are for."""
    found: list[Style] = [style for style, pattern in PATHS.items() if pattern.fullmatch(path)]
    return found[0] if method == "POST" and found and chosen in (None, found[0]) else None


def unpacked(body: bytes, encoding: str) -> bytes:
    """Undo the Content-Encoding of a body; raises Unreadable."""
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "deflate"):
        raise Unreadable(coding)
    try:
        reader = zlib.decompressobj(47 if coding == "gzip" else 15)
        plain = reader.decompress(body, LIMIT_BYTES)
    except zlib.error as error:
        raise Unreadable(str(error)) from None
    if not reader.eof or reader.unused_data:
        raise Unreadable("longer than what is looked into")
    return plain


class _Head(msgspec.Struct):
    messages: list[Message]
    model: str = ""
    system: object = None
    tools: object = None
    cache_control: object = None
    prompt_cache_retention: object = None


class _Raw(msgspec.Struct):
    messages: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Body:
    """A body that was read: `text` is what was sent, decompressed."""

    text: bytes
    head: _Head

    @classmethod
    def read(cls, text: bytes) -> "Body":
        """Raises Unreadable."""
        try:
            return cls(text, msgspec.json.decode(text, type=_Head))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreadable(type(error).__name__) from None

    @property
    def model(self) -> str:
        return self.head.model

    def turn(self, style: Style, price: Price | None) -> Turn:
        """Return the request as the rules see it; raises Unreadable.

        All messages are cached where the whole body is marked (Anthropic), or the provider does so unasked.
        """
        head, whole = self.head, len(self.head.messages)
        try:
            if style == "anthropic" and head.cache_control:
                marked = [*head.messages, {"cache_control": head.cache_control}]
                return turn_of(head.messages, head.system, head.tools, cached=whole, ttl=prefix_ttl(marked))
            if style == "openai" and price is not None and price.automatic_s:
                in_memory = head.prompt_cache_retention in ("in_memory", "in-memory")
                kept = IN_MEMORY_S if in_memory else price.automatic_s
                return turn_of(head.messages, head.system, head.tools, cached=whole, ttl=kept)
            return turn_of(head.messages, head.system, head.tools)
        except RecursionError:
            raise Unreadable("nested too deeply") from None

    def with_messages(self, messages: Sequence[Message]) -> bytes:
        """Return the body with those messages replaced that are not the same objects as before."""
        members: Mapping[str, msgspec.Raw] = msgspec.json.decode(self.text, type=dict[str, msgspec.Raw])
        raw = msgspec.json.decode(self.text, type=_Raw).messages
        spliced = [
            old if before is after else after
            for old, before, after in zip(raw, self.head.messages, messages, strict=True)
        ]
        return msgspec.json.encode({**members, "messages": spliced})
