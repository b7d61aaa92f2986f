"""Usage is read from any response, in whatever pieces its bytes come."""

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.api.relay.prices import Tokens
from regrow.api.relay.usage import UsageReader
from tests.api.relay.provider import Bill
from tests.api.relay.server import anthropic_answer, anthropic_events, openai_answer, openai_events

BILL = Bill(fresh=10, read=200, written_5m=30, written_1h=7)
WHOLE = Tokens(fresh=10, read=200, written_5m=30, written_1h=7, output=5)
OPENAI = Tokens(fresh=47, read=200, output=5)
RESPONSES = {
    "anthropic": ("application/json", json.dumps(anthropic_answer(BILL, True)).encode(), WHOLE),
    "anthropic stream": ("text/event-stream", b"".join(anthropic_events(BILL)), WHOLE),
    "openai": ("application/json", json.dumps(openai_answer(BILL, True)).encode(), OPENAI),
    "openai stream": ("text/event-stream", b"".join(openai_events(BILL)), OPENAI),
}
PACKED = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}


def read(kind: str, text: bytes, coding: str, size: int) -> Tokens | None:
    reader = UsageReader(kind, coding)
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    return reader.tokens


@given(st.sampled_from(sorted(RESPONSES)), st.sampled_from(sorted(PACKED)), st.integers(1, 3000))
def test_the_usage_of_every_kind_of_response_is_read(response: str, coding: str, size: int) -> None:
    kind, text, tokens = RESPONSES[response]
    assert read(kind, PACKED[coding](text), coding, size) == tokens


@pytest.mark.parametrize(
    "kind, text, coding",
    [
        ("application/json", b"", ""),
        ("application/json", b'{"error": "busy"}', ""),
        ("application/json", b"<html>", ""),
        ("application/json", b'{"usage": 5}', ""),
        ("application/json", b'{"usage": {"input_tokens": 1}}', "br"),
        ("application/json", b"no gzip", "gzip"),
        ("text/event-stream", b'data: {"usage": {"input_tokens"\n\n', ""),
        ("text/event-stream", b'data: {"usage": null}\n\ndata: [DONE]\n\n', ""),
    ],
)
def test_what_tells_no_usage_has_none(kind: str, text: bytes, coding: str) -> None:
    assert read(kind, text, coding, 7) is None


def test_a_stream_that_was_cut_off_tells_what_it_told() -> None:
    events = anthropic_events(BILL)
    tokens = read("text/event-stream", b"".join(events[:3]), "", 50)
    assert tokens == Tokens(fresh=10, read=200, written_5m=30, written_1h=7, output=1)


def test_more_than_what_is_held_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.api.relay.usage.LIMIT_BYTES", 100)
    kind, text, _ = RESPONSES["anthropic"]
    assert read(kind, text, "", 10) is None
