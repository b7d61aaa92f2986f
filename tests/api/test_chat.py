import asyncio

import pytest

from regrow.errors import DeviceFailed, NonFiniteLogits
from tests.api.conftest import Start, chat_body
from tests.api.stub import (
    MOUNTED,
    PROGRESS,
    QUEUED,
    READ,
    TEXT,
    TOKENS,
    WHOLE_LIFE,
    StubEngine,
    failed,
    finished,
)

REGROW = {
    "source": "checkpoint",
    "slot": 1,
    "reused": 64,
    "read": 36,
    "queue_ms": 1.3,
    "mount_ms": 2.0,
    "read_ms": 30.0,
    "exact": "cache",
    "why": "the system prompt changed at 'Current time: 15:09:34'",
    "diverged": None,
}
MESSAGES = [{"role": "user", "content": "Hello there"}]


async def test_an_answer_has_the_text_the_usage_and_what_was_reused(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    answer = await served.openai.chat.completions.create(model="stub", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id == "chatcmpl-run-0"
    assert answer.model == "stub"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 3, 103)
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert answer.model_extra["regrow"] == REGROW


async def test_a_stream_opens_with_the_role_and_closes_with_the_reason_and_what_was_reused(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    stream = await served.openai.chat.completions.create(model="stub", messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]
    assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
        ("chatcmpl-run-0", "chat.completion.chunk", "stub")
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-1]] == ["Grüße", " dir", "!"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert chunks[-1].model_extra["regrow"] == REGROW
    assert all(chunk.usage is None for chunk in chunks)


async def test_a_stream_that_asked_for_usage_ends_with_it_beside_what_was_reused(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    stream = await served.openai.chat.completions.create(
        model="stub", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *before, last = [chunk async for chunk in stream]
    assert before[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == 64
    assert last.model_extra["regrow"] == REGROW
    assert all("regrow" not in chunk.model_extra and chunk.usage is None for chunk in before)


async def test_progress_chunks_come_only_where_asked_for_and_in_order(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    stream = await served.openai.chat.completions.create(
        model="stub", messages=MESSAGES, stream=True, extra_body={"regrow": {"progress": True}}
    )
    told = [c.model_extra["regrow"] async for c in stream if not c.choices]
    assert told == [
        {"phase": "queued", "ahead": 2},
        {"phase": "placed", "slot": 1, "source": "checkpoint", "reused": 64, "total": 100},
        {"phase": "mounted", "reused": 64, "ms": 2.0},
        {"phase": "reading", "position": 80, "reused": 64, "total": 100, "tok_s": 500.0, "eta_ms": 40.0},
        {"phase": "decoding", "reused": 64, "read": 36, "ms": 30.0},
    ]


async def test_a_stream_is_framed_as_server_sent_events_with_a_request_id(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    headers = {"X-Request-Id": "mine-1"}
    async with served.http.post(
        "/v1/chat/completions", json=chat_body(stream=True), headers=headers
    ) as response:
        text = await response.text()
    assert response.content_type == "text/event-stream"
    assert response.headers["X-Request-Id"] == "mine-1"
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])


async def test_a_finish_reason_of_length_is_told(start: Start) -> None:
    served = await start(StubEngine([*WHOLE_LIFE[:-1], finished("length", "")]))
    _, answer = await served.post(chat_body())
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "Grüße dir"


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (failed(DeviceFailed("out of memory")), 503, "device_failed"),
        (failed(NonFiniteLogits("not finite")), 500, "non_finite_logits"),
        (finished("cancelled"), 503, "cancelled"),
        (ValueError("secret"), 500, "internal_error"),
    ],
)
async def test_an_answer_that_fails_is_an_http_error(start: Start, end, status: int, code: str) -> None:
    served = await start(StubEngine([QUEUED, *TOKENS, end]))
    got, answer = await served.post(chat_body())
    assert (got, answer["error"]["code"]) == (status, code)
    assert "secret" not in str(answer)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (failed(DeviceFailed("out of memory")), "device_failed"),
        (finished("cancelled"), "cancelled"),
        (ValueError("secret"), "internal_error"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error_event_and_done(start: Start, end, code: str) -> None:
    served = await start(StubEngine([QUEUED, *TOKENS, end]))
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        text = await response.text()
    assert response.status == 200
    *_, error, done, rest = text.split("\n\n")
    assert error.startswith('data: {"error":')
    assert f'"code":"{code}"' in error
    assert (done, rest) == ("data: [DONE]", "")
    assert "secret" not in text


async def test_the_official_client_raises_the_error_of_a_stream(start: Start) -> None:
    served = await start(StubEngine([*TOKENS, failed(DeviceFailed("out of memory"))]))
    stream = await served.openai.chat.completions.create(model="stub", messages=MESSAGES, stream=True)
    with pytest.raises(Exception, match="out of memory"):
        [chunk async for chunk in stream]


async def test_a_failed_stream_still_says_what_was_read(start: Start) -> None:
    served = await start(StubEngine([MOUNTED, PROGRESS, READ, failed(DeviceFailed("gone"))]))
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        text = await response.text()
    assert '"read":36' in text.split("\n\n")[-3]


async def test_many_requests_at_once_each_get_their_own_answer(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    answers = await asyncio.gather(*(served.post(chat_body()) for _ in range(20)))
    assert {answer["id"] for _, answer in answers} == {f"chatcmpl-run-{i}" for i in range(20)}
    assert all(run.ended and not run.cancelled.is_set() for run in engine.runs)
