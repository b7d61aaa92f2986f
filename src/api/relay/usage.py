"""What a response was billed for, read from a copy of its bytes as they pass: JSON or an event stream, plain
or compressed. Nothing here changes or holds back what the client gets.
"""

import zlib

import msgspec

from regrow.api.relay.prices import Tokens

READABLE = ("gzip", "deflate", "identity")  # the codings that can be looked into
LIMIT_BYTES = 64 * 1024 * 1024  # of JSON that is held until its end, and of one line of a stream


class _Writes(msgspec.Struct):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    cache_write_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """The members of both shapes; a stream tells them in parts."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: _Writes | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None
    message: _Message | str | None = None


class UsageReader:
    """Feed it the bytes of a response's body in any pieces, then ask for `tokens`."""

    def __init__(self, content_type: str, encoding: str = "") -> None:
        self._stream = content_type.startswith("text/event-stream")
        coding = encoding.strip().lower() or "identity"
        self._lost = coding not in READABLE
        self._plain = None if coding == "identity" else zlib.decompressobj(47 if coding == "gzip" else 15)
        self._rest = bytearray()
        self._found: dict[str, object] = {}

    def feed(self, chunk: bytes) -> None:
        if self._lost:
            return
        try:
            text = self._plain.decompress(chunk, LIMIT_BYTES) if self._plain else chunk
        except zlib.error:
            self._lost = True
            return
        self._rest += text
        if self._stream:
            *lines, rest = self._rest.split(b"\n") if b"\n" in text else [self._rest]
            self._rest = rest
            for line in lines:
                if line.startswith(b"data:") and b'"usage"' in line:
                    self._note(bytes(line[5:]))
        if len(self._rest) > LIMIT_BYTES:
            self._lost = True
            self._rest.clear()

    @property
    def tokens(self) -> Tokens | None:
        """What was billed, as far as the response told; None where it did not, or could not be read."""
        if not self._stream and not self._lost:
            self._note(bytes(self._rest))
        if not self._found:
            return None
        usage = msgspec.convert(self._found, _Usage)
        details = usage.prompt_tokens_details or _Details()
        read = usage.cache_read_input_tokens or details.cached_tokens or 0
        writes = usage.cache_creation
        hour = writes.ephemeral_1h_input_tokens if writes else 0
        written = (usage.cache_creation_input_tokens or details.cache_write_tokens or 0) - hour
        fresh = usage.input_tokens or max(0, (usage.prompt_tokens or 0) - read)
        return Tokens(fresh, read, written, hour, usage.output_tokens or usage.completion_tokens or 0)

    def _note(self, text: bytes) -> None:
        try:
            event = msgspec.json.decode(text, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        told = event.usage or (event.message.usage if isinstance(event.message, _Message) else None)
        if told is not None:
            self._found |= {
                key: value for key, value in msgspec.to_builtins(told).items() if value is not None
            }
