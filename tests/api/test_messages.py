"""/v1/messages as Anthropic's clients know it."""

import json
from collections.abc import AsyncIterator

import anthropic
import pytest
import pytest_asyncio

from regrow.actors.events import Token
from regrow.api.stamps import without_stamps
from regrow.errors import ContextLengthExceeded, DeviceFailed, Overloaded
from regrow.models.answer_reader import ThinkingTags
from regrow.policy.request import CallAnswer, JsonAnswer
from tests.api.conftest import Served, Start
from tests.api.stub import (
    MOUNTED,
    PLACED,
    PROGRESS,
    QUEUED,
    READ,
    TEXT,
    StubEngine,
    StubModel,
    failed,
    finished,
)

PATH = "/v1/messages"
MESSAGES = [{"role": "user", "content": "Hello there"}]
TOOLS = [{"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}]
SAID = (
    "<think>\nHm.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "n": [1, 2]}}\n</tool_call>'
)
STAMP = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"


def body(**fields: object) -> dict[str, object]:
    return {"model": "stub", "max_tokens": 50, "messages": MESSAGES, **fields}


def saying(text: str, reason: str = "stop", stop: str | None = None) -> StubEngine:
    tokens = [Token(1.5, i, text[i : i + 3]) for i in range(0, len(text), 3)]
    end = finished(reason, "")
    end = type(end)(end.at, end.reason, end.text, end.usage, end.reuse, stop)
    return StubEngine(
        [QUEUED, PLACED, MOUNTED, PROGRESS, READ, *tokens, end],
        StubModel(thinking=ThinkingTags("<think>", "</think>")),
    )


@pytest_asyncio.fixture
async def client_of() -> AsyncIterator[object]:
    clients = []

    def client(served: Served) -> anthropic.AsyncAnthropic:
        clients.append(anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0))
        return clients[-1]

    yield client
    for made in clients:
        await made.close()


async def test_a_message_has_its_blocks_its_reason_and_its_usage(start: Start, client_of) -> None:
    client = client_of(await start(saying(SAID)))
    message = await client.messages.create(model="stub", max_tokens=50, messages=MESSAGES, tools=TOOLS)
    thought, text, call = message.content
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "tool_use")
    assert (thought.thinking, text.text) == ("Hm.", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris", "n": [1, 2]})
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (36, 64, 3)
    assert message.model_extra["regrow"]["reused"] == 64


async def test_a_stream_adds_up_to_the_same_message(start: Start, client_of) -> None:
    client = client_of(await start(saying(SAID)))
    request = {"model": "stub", "max_tokens": 50, "messages": MESSAGES, "tools": TOOLS}
    whole = await client.messages.create(**request)
    async with client.messages.stream(**request) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    for message in (whole, final):
        message.content[2].id = ""
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in whole.content]
    assert (final.stop_reason, final.usage.cache_read_input_tokens) == ("tool_use", 64)
    assert final.usage.output_tokens == 3
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


async def test_the_events_of_a_stream_are_named_and_each_block_is_opened_and_closed(start: Start) -> None:
    served = await start(saying(SAID))
    async with served.http.post(PATH, json=body(stream=True, tools=TOOLS)) as response:
        text = await response.text()
    assert response.content_type == "text/event-stream"
    frames = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.strip().split("\n\n")]
    events = [json.loads(frame["data"]) for frame in frames]
    assert [frame["event"] for frame in frames] == [event["type"] for event in events]
    assert events[0]["message"]["usage"] == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 0,
    }
    edges = [
        (e["type"], e["index"]) for e in events if e["type"] in ("content_block_start", "content_block_stop")
    ]
    assert edges == [(f"content_block_{edge}", i) for i in range(3) for edge in ("start", "stop")]
    opened = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use"]
    parts = [
        e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert len(parts) > 2
    assert json.loads("".join(parts)) == {"city": "Paris", "n": [1, 2]}


@pytest.mark.parametrize(
    ("engine", "reason", "stop"),
    [
        (saying("Hi."), "end_turn", None),
        (saying("Hi", "length"), "max_tokens", None),
        (saying("Hi", "stop", "END"), "stop_sequence", "END"),
        (saying(SAID[:-40], "length"), "max_tokens", None),
    ],
)
async def test_why_a_message_ended_is_told(
    start: Start, client_of, engine, reason: str, stop: str | None
) -> None:
    client = client_of(await start(engine))
    request = {"model": "stub", "max_tokens": 50, "messages": MESSAGES, "tools": TOOLS}
    message = await client.messages.create(**request)
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    assert all(block.type != "tool_use" for block in message.content)
    async with client.messages.stream(**request) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == (reason, stop)


async def test_a_conversation_goes_to_the_template_in_its_own_shape(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "rain", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    status, _ = await served.post(
        body(system=system, messages=messages, tools=TOOLS, stop_sequences=["x"]), PATH
    )
    assert status == 200
    (request,) = engine.requests
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}, "id": "t1"}
    none = {"type": "function", "function": {"name": "weather", "arguments": "{}"}, "id": "t2"}
    assert request.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [call, none]},
        {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "t1"},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "And?"},
    ]
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "d", "parameters": TOOLS[0]["input_schema"]},
        }
    ]
    assert (request.max_tokens, request.stop) == (50, ("x",))
    assert request.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "answer", "options"),
    [
        ({"tool_choice": {"type": "auto"}}, None, {"enable_thinking": False}),
        ({"tool_choice": {"type": "any"}}, CallAnswer(("weather",)), {"enable_thinking": False}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            CallAnswer(("weather",), False),
            {"enable_thinking": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}, "thinking": {"type": "adaptive"}},
            CallAnswer(("weather",), False),
            {},
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, None, {"enable_thinking": True}),
        (
            {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"enum": [1]}}}},
            JsonAnswer({"enum": [1]}),
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
async def test_choices_of_tools_thinking_and_forms_reach_the_engine(
    start: Start, engine: StubEngine, fields: dict, answer: object, options: dict
) -> None:
    served = await start(engine)
    status, told = await served.post(body(tools=TOOLS, **fields), PATH)
    assert status == 200, told
    assert (engine.requests[0].answer, engine.requests[0].template_options) == (answer, options)


async def test_a_last_assistant_message_is_gone_on_with(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    await served.post(body(messages=[*MESSAGES, {"role": "assistant", "content": "Well,"}]), PATH)
    assert engine.requests[0].template_options["continue_final_message"] is True


async def test_a_prompt_is_counted_without_an_answer(start: Start, engine: StubEngine, client_of) -> None:
    client = client_of(await start(engine))
    counted = await client.messages.count_tokens(
        model="stub", messages=MESSAGES, system="Be brief.", tools=TOOLS
    )
    assert counted.input_tokens == 4
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]: this model has no vision",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0]: documents",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image", "source": {}}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0]: this model has no vision",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]: a thinking block",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_field_is_a_400_that_names_it(
    start: Start, engine: StubEngine, fields: dict, named: str
) -> None:
    served = await start(engine)
    status, told = await served.post({k: v for k, v in body(**fields).items() if v is not None}, PATH)
    assert status == 400
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert named in told["error"]["message"]


async def test_errors_have_anthropics_shape_and_the_official_client_knows_them(
    start: Start, client_of
) -> None:
    engine = StubEngine()
    served = await start(engine)
    client = client_of(served)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", max_tokens=5, messages=MESSAGES)
    engine.refuse_with = Overloaded("the queue is full", 3)
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(model="stub", max_tokens=5, messages=MESSAGES)
    assert full.value.response.headers["Retry-After"] == "3"
    for prompt, wanted in (
        (4000, "exceed context limit: 4000 + 200 > 4096"),
        (5000, "prompt is too long: 5000 tokens"),
    ):
        engine.refuse_with = ContextLengthExceeded(prompt, 200, 4096)
        with pytest.raises(anthropic.BadRequestError, match=wanted.replace("+", r"\+")):
            await client.messages.create(model="stub", max_tokens=5, messages=MESSAGES)
    async with served.http.get(PATH) as response:
        assert (response.status, (await response.json())["type"]) == (405, "error")
    async with served.http.post(PATH, data=b"{", headers={"Content-Type": "application/json"}) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")


async def test_a_key_is_asked_for_and_a_request_is_named_as_anthropic_does(
    start: Start, engine: StubEngine, client_of
) -> None:
    served = await start(engine, api_keys=("secret",))
    client = client_of(served)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await client.messages.create(model="stub", max_tokens=5, messages=MESSAGES)
    assert refused.value.body["error"]["type"] == "authentication_error"
    keyed = client.with_options(api_key="secret", default_headers={"X-Request-Id": "mine-1"})
    message = await keyed.messages.create(model="stub", max_tokens=5, messages=MESSAGES)
    assert message._request_id == "mine-1"


@pytest.mark.parametrize("error", [DeviceFailed("out of memory"), ValueError("secret")])
async def test_a_stream_that_fails_ends_with_an_error_event(
    start: Start, client_of, error: Exception
) -> None:
    end = failed(error) if isinstance(error, DeviceFailed) else error
    served = await start(StubEngine([PLACED, READ, Token(1.0, 1, "Hi"), end]))
    async with served.http.post(PATH, json=body(stream=True)) as response:
        text = await response.text()
    *_, last = text.strip().split("\n\n")
    assert last.startswith("event: error\n")
    assert "secret" not in text
    with pytest.raises(anthropic.APIStatusError):
        async with client_of(served).messages.stream(model="stub", max_tokens=5, messages=MESSAGES) as stream:
            await stream.get_final_message()


async def test_a_plain_answer_is_one_block_of_text(start: Start, engine: StubEngine, client_of) -> None:
    message = await client_of(await start(engine)).messages.create(
        model="stub", max_tokens=5, messages=MESSAGES
    )
    assert [block.text for block in message.content] == [TEXT]


async def test_stamps_of_agents_are_left_out_of_system_prompts_unless_they_are_to_stay(start: Start) -> None:
    for keep, wanted in ((False, "You are an agent."), (True, STAMP.format("eb6c6") + "\nYou are an agent.")):
        engine = StubEngine()
        served = await start(engine, keep_stamps=keep)
        blocks = [
            {"type": "text", "text": STAMP.format("eb6c6")},
            {"type": "text", "text": "You are an agent."},
        ]
        for system in (blocks, f"{STAMP.format('eb6c6')}\nYou are an agent."):
            await served.post(body(system=system), PATH)
        assert [request.messages[0]["content"] for request in engine.requests] == [wanted, wanted]


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (STAMP, ""),
        (f"{STAMP}\n\nYou are.", "You are."),
        (f"\n{STAMP}\nX-Session-Id: 5\nYou are.", "You are."),
        (f"You are.\n{STAMP}\n", f"You are.\n{STAMP}\n"),
        ("x-ray: a picture\nof a bone", "x-ray: a picture\nof a bone"),
        ("", ""),
    ],
)
def test_only_stamps_that_open_a_system_prompt_are_left_out(system: str, left: str) -> None:
    assert without_stamps(system) == left
