"""/v1/completions: every prompt gets its own choice, whole or streamed, and nothing is left running."""

import asyncio
import json

import pytest

from regrow.api.batch import AT_ONCE
from regrow.errors import BadRequest, DeviceFailed
from tests.api.conftest import Served, Start
from tests.api.stub import (
    PLACED,
    PROGRESS,
    QUEUED,
    TEXT,
    TOKENS,
    WHOLE_LIFE,
    Hold,
    StubEngine,
    StubModel,
    failed,
    finished,
)
from tests.api.test_chat import REGROW

PATH = "/v1/completions"


def body(prompt: object = "Once upon", **fields: object) -> dict[str, object]:
    return {"model": "stub", "prompt": prompt, **fields}


async def streamed(served: Served, **fields: object) -> list[dict]:
    """Post a body for a stream; returns its events, after checking that it ends with [DONE]."""
    async with served.http.post(PATH, json=body(stream=True, **fields)) as response:
        assert response.status == 200
        *events, done, rest = (await response.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_an_answer_has_the_text_the_usage_and_what_was_reused(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    answer = await served.openai.completions.create(model="stub", prompt="Once upon")
    assert (answer.object, answer.id, answer.model) == ("text_completion", "cmpl-run-0", "stub")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, TEXT, "stop", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 3, 103)
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert answer.model_extra["regrow"] == REGROW
    assert engine.requests[0].prompt == "Once upon"


async def test_a_stream_closes_with_the_reason_and_what_was_reused(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    stream = await served.openai.completions.create(model="stub", prompt="Once upon", stream=True)
    chunks = [chunk async for chunk in stream]
    assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
        ("cmpl-run-0", "text_completion", "stub")
    }
    assert [chunk.choices[0].text for chunk in chunks] == ["Grüße", " dir", "!", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 3 + ["stop"]
    assert chunks[-1].model_extra["regrow"] == REGROW
    assert all(chunk.usage is None and "regrow" not in chunk.model_extra for chunk in chunks[:-1])


async def test_a_stream_that_asked_for_usage_ends_with_it_beside_what_was_reused(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    stream = await served.openai.completions.create(
        model="stub", prompt="Once upon", stream=True, stream_options={"include_usage": True}
    )
    *before, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == 64
    assert last.model_extra["regrow"] == REGROW
    assert all("regrow" not in chunk.model_extra and chunk.usage is None for chunk in before)


@pytest.mark.parametrize("prompts", [["first", "second"], [[11, 12], [13]]], ids=["texts", "ids"])
async def test_each_prompt_of_a_list_has_a_choice_of_its_own(start: Start, prompts: list) -> None:
    hold = Hold()
    first, second = ["first", "second"] if prompts == ["first", "second"] else ["11 12", "13"]
    engine = StubEngine({first: [hold, *WHOLE_LIFE], second: [TOKENS[2], finished("length", "")]})
    served = await start(engine)
    asking = asyncio.create_task(served.openai.completions.create(model="stub", prompt=prompts))
    runs = [await engine.started.get() for _ in prompts]
    await runs[0].waiting.wait()  # the second prompt is taken, and answered, while the first waits
    hold.gate.set()
    answer = await asking
    assert [request.prompt for request in engine.requests] == prompts
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, TEXT, "stop"),
        (1, " dir", "length"),
    ]
    assert [c.model_extra["regrow"] for c in answer.choices] == [REGROW, REGROW]
    assert "regrow" not in answer.model_extra
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (200, 6, 206)
    assert usage.prompt_tokens_details.cached_tokens == 128


async def test_a_list_of_ids_is_one_prompt(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    answer = await served.openai.completions.create(model="stub", prompt=[5, 6, 7])
    assert len(answer.choices) == 1
    assert engine.requests[0].prompt == [5, 6, 7]


async def test_choices_of_a_stream_come_as_they_are_drawn(start: Start) -> None:
    hold = Hold()
    engine = StubEngine({"slow": [TOKENS[0], hold, finished("stop", "")], "quick": WHOLE_LIFE})
    served = await start(engine)
    stream = await served.openai.completions.create(
        model="stub", prompt=["slow", "quick"], stream=True, stream_options={"include_usage": True}
    )
    told: list = []
    async for chunk in stream:
        told += [(c.index, c.text, c.finish_reason, "regrow" in c.model_extra) for c in chunk.choices]
        if told[-1][:3] == (1, "", "stop"):
            hold.gate.set()
    assert told[-1] == (0, "", "stop", True)
    assert [text for index, text, *_ in told if index == 1] == ["Grüße", " dir", "!", ""]
    assert [text for index, text, *_ in told if index == 0] == ["Grüße", ""]
    assert [reused for *_, reason, reused in told] == [reason == "stop" for *_, reason, _ in told]
    assert chunk.choices == []
    assert chunk.usage.prompt_tokens_details.cached_tokens == 128
    assert "regrow" not in chunk.model_extra


async def test_a_long_list_is_answered_a_few_at_a_time(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([hold, *WHOLE_LIFE])
    served = await start(engine)
    prompts = [f"prompt {i}" for i in range(2 * AT_ONCE + 3)]
    asking = asyncio.create_task(served.post(body(prompts), PATH))
    for _ in range(AT_ONCE):
        await (await engine.started.get()).waiting.wait()
    assert len(engine.requests) == AT_ONCE
    hold.gate.set()
    status, answer = await asking
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    assert sorted(request.prompt for request in engine.requests) == sorted(prompts)


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("Once upon", ["Once upon"]),
        ([3, 5], ["xxx xxxxx"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([[3], [4]], ["xxx", "xxxx"]),
    ],
    ids=str,
)
async def test_echo_puts_the_text_of_the_prompt_before_the_answer(
    start: Start, engine: StubEngine, prompt: object, before: list[str]
) -> None:
    served = await start(engine)
    _, answer = await served.post(body(prompt, echo=True), PATH)
    assert [choice["text"] for choice in answer["choices"]] == [text + TEXT for text in before]
    chunks = await streamed(served, prompt=prompt, echo=True)
    for index, text in enumerate(before):
        rows = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert rows == [text, "Grüße", " dir", "!", ""]


async def test_progress_comes_only_where_asked_for_and_says_which_prompt_it_is_of(start: Start) -> None:
    engine = StubEngine({"a": [QUEUED, PLACED, PROGRESS, finished()], "b": [PLACED, finished()]})
    served = await start(engine)
    chunks = await streamed(served, prompt=["a", "b"], regrow={"progress": True})
    told = [(c["regrow"]["index"], c["regrow"]["phase"]) for c in chunks if not c["choices"]]
    assert [phase for index, phase in told if index == 0] == ["queued", "placed", "reading"]
    assert [phase for index, phase in told if index == 1] == ["placed"]
    single = await streamed(served, prompt="a", regrow={"progress": True})
    assert single[0]["regrow"] == {"phase": "queued", "ahead": 2}
    assert all(chunk["choices"] for chunk in await streamed(served, prompt="a"))


async def test_an_answer_that_fails_is_an_http_error_and_ends_the_others(start: Start) -> None:
    engine = StubEngine({"bad": [*TOKENS, failed(DeviceFailed("out of memory"))], "good": [Hold()]})
    served = await start(engine)
    status, answer = await served.post(body(["good", "bad"]), PATH)
    assert (status, answer["error"]["code"]) == (503, "device_failed")
    assert engine.runs[0].cancelled.is_set()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (failed(DeviceFailed("out of memory")), "device_failed"),
        (finished("cancelled"), "cancelled"),
        (ValueError("secret"), "internal_error"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error_event_and_ends_the_others(
    start: Start, end: object, code: str
) -> None:
    engine = StubEngine({"bad": [*TOKENS, end], "good": [Hold()]})
    served = await start(engine)
    events = await streamed(served, prompt=["good", "bad"])
    assert [event.get("error", {}).get("code") for event in events] == [None] * (len(events) - 1) + [code]
    assert "secret" not in str(events)
    assert ("regrow" in events[-1]) is (code != "internal_error")
    assert engine.runs[0].cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_the_engine_refuses_is_named_and_none_is_answered(
    start: Start, engine: StubEngine, stream: bool
) -> None:
    served = await start(engine)
    status, answer = await served.post(body(["good", ""], stream=stream), PATH)
    assert (status, answer["error"]["param"]) == (400, "prompt[1]")
    assert engine.runs[0].cancelled.is_set()
    status, answer = await served.post(body("word " * 5000, stream=stream), PATH)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert answer["error"]["code"] == "context_length_exceeded"


async def test_a_prompt_refused_after_the_stream_began_is_named_in_its_last_event(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    events = await streamed(served, prompt=[*["good"] * AT_ONCE, ""])
    assert events[-1]["error"]["param"] == f"prompt[{AT_ONCE}]"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_goes_away_ends_all_its_runs(start: Start, stream: bool) -> None:
    engine = StubEngine([*TOKENS, Hold(), finished()])
    served = await start(engine)
    client = asyncio.create_task(served.post(body(["one", "two", "three"], stream=stream), PATH))
    runs = [await engine.started.get() for _ in range(3)]
    for run in runs:
        await run.waiting.wait()
    client.cancel()
    for run in runs:
        await run.cancelled.wait()


async def test_a_silent_stream_gets_comments(start: Start) -> None:
    hold = Hold()
    served = await start(StubEngine([hold, finished()]), keepalive_s=0.01)
    async with served.http.post(PATH, json=body(["a", "b"], stream=True)) as response:
        comments = 0
        async for line in response.content:
            comments += line == b": keep-alive\n"
            if comments == 3:
                hold.gate.set()
    assert comments >= 3


async def test_a_model_without_a_chat_template_is_served(start: Start) -> None:
    served = await start(StubEngine(info=StubModel(has_template=False)))
    answer = await served.openai.completions.create(model="stub", prompt="Once upon")
    assert answer.choices[0].text == TEXT


async def test_errors_of_the_engine_are_not_renamed_where_they_are_of_another_field(
    start: Start, engine: StubEngine
) -> None:
    engine.refuse_with = BadRequest("no", "cache_salt")
    served = await start(engine)
    status, answer = await served.post(body(["a", "b"]), PATH)
    assert (status, answer["error"]["param"]) == (400, "cache_salt")
