"""A streamed answer of which a test reads as much as it wants; leaving the block leaves the server."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from tests.e2e.server import Client
from tests.e2e.talk import Message


@dataclass
class Stream:
    """texts: the pieces of the answer so far. slot: where it is served, once that is told."""

    chunks: openai.AsyncStream[ChatCompletionChunk]
    texts: list[str]
    slot: int | None = None
    reason: str | None = None

    async def phase(self, name: str) -> Mapping[str, Any]:
        """Read on until the request is in this phase; return what the server tells of it."""
        async for chunk in self.chunks:
            facts = self._take(chunk)
            if facts.get("phase") == name:
                return facts
        raise AssertionError(f"the stream ended before the phase {name}")

    async def tokens(self, n: int) -> None:
        """Read on until `n` pieces of text have come."""
        async for chunk in self.chunks:
            self._take(chunk)
            if len(self.texts) >= n:
                return
        raise AssertionError(f"the stream ended after {len(self.texts)} pieces")

    async def end(self) -> Mapping[str, Any]:
        """Read to the end; return the facts of the reuse."""
        facts: Mapping[str, Any] = {}
        async for chunk in self.chunks:
            facts = self._take(chunk) or facts
        return facts

    def _take(self, chunk: ChatCompletionChunk) -> Mapping[str, Any]:
        for choice in chunk.choices:
            self.reason = choice.finish_reason or self.reason
            if choice.delta.content:
                self.texts.append(choice.delta.content)
        facts: Mapping[str, Any] = (chunk.model_extra or {}).get("regrow") or {}
        self.slot = facts.get("slot", self.slot)
        return facts


@asynccontextmanager
async def streaming(
    client: Client, model: str, messages: Sequence[Message], **fields: object
) -> AsyncIterator[Stream]:
    """Send one request whose answer does not end by itself."""
    body = {"temperature": 0, "ignore_eos": True, "regrow": {"progress": True}, **fields}
    chunks = await client.openai.chat.completions.create(
        model=model, messages=messages, stream=True, extra_body=body
    )
    async with chunks:
        yield Stream(chunks, [])
