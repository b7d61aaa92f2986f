"""The Responses API with a scripted engine, through the official client: create, stream, continue, fetch."""

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest
from pydantic import BaseModel

from regrow.actors.events import Logprob, Token
from regrow.api.responses.items import items_of, messages_of
from regrow.api.responses.schema import Said
from regrow.api.responses.store import STORE, Kept, ResponseStore
from regrow.errors import BadRequest, DeviceFailed, Overloaded
from regrow.models.answer_reader import ThinkingTags
from tests.api.conftest import Served, Start
from tests.api.stub import (
    QUEUED,
    READ,
    TEXT,
    TOKENS,
    Hold,
    StubEngine,
    StubModel,
    failed,
    finished,
)

IN_TIME = 20.0
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "run", "arguments": {"a": 1}}\n</tool_call>'
OUTPUT = "function_call_output"
TOOL: Any = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": True}


def answering(*texts: str, **options: Any) -> StubEngine:
    """An engine whose runs all say these texts, one a token."""
    tokens = [Token(1.0, i, text) for i, text in enumerate(texts)]
    return StubEngine([QUEUED, READ, *tokens, finished(text="", **options)])


async def create(served: Served, **fields: Any) -> Any:
    return await served.openai.responses.create(**{"model": "stub", "input": "Hello there", **fields})


async def test_a_response_has_text_usage_and_what_was_reused(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    response = await create(served, instructions="Be brief", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.instructions == "Be brief"
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (100, 3, 103)
    assert usage.input_tokens_details.cached_tokens == 64
    assert response.model_extra["regrow"]["source"] == "checkpoint"
    request = engine.requests[0]
    assert request.messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hello there"},
    ]
    assert request.sampling.temperature == 0.5


async def test_the_events_of_a_stream_come_in_order_and_add_up_to_the_response(start: Start) -> None:
    engine = answering(THOUGHT, "I call", " it.\n", CALL)
    engine.info = StubModel(thinking=ThinkingTags("<think>", "</think>"))
    served = await start(engine)
    async with served.openai.responses.stream(model="stub", input="Hello", tools=[TOOL]) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    kinds = [event.type for event in events]
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        at = kinds.index(f"response.{kind}.delta")
        assert at < kinds.index(f"response.{kind}.done")
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))
    reasoning, message, call = response.output
    assert reasoning.content[0].text.strip() == "hm"
    assert message.content[0].text.strip() == "I call it."
    assert (call.name, json.loads(call.arguments)) == ("run", {"a": 1})
    assert response.usage.output_tokens_details.reasoning_tokens == 1


async def test_a_stream_is_the_same_response_that_is_given_whole(start: Start) -> None:
    served = await start(answering("Hello ", "you. ", CALL))
    whole = await create(served, tools=[TOOL])
    stream = await create(served, tools=[TOOL], stream=True)
    last = [event async for event in stream][-1].response
    for given in (whole, last):
        shown = given.to_dict()
        for item in shown["output"]:
            item["id"] = item["call_id"] = ""
        for name in ("id", "created_at", "completed_at"):
            shown[name] = ""
        given.shown = shown
    assert whole.shown == last.shown


async def test_a_continued_response_loses_no_reasoning_no_call_and_no_result(start: Start) -> None:
    engine = answering(THOUGHT, "I call it.\n", CALL, CALL.replace("1", "2"))
    engine.info = StubModel(thinking=ThinkingTags("<think>", "</think>"))
    served = await start(engine)
    first = await create(served, tools=[TOOL], instructions="Be brief")
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": OUTPUT, "call_id": call.call_id, "output": call.arguments} for call in calls]
    second = await create(served, previous_response_id=first.id, input=results, tools=[TOOL])
    await create(served, previous_response_id=second.id, input="And now?", instructions="Be long")
    messages = engine.requests[2].messages
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user")
    ]
    assert messages[0]["content"] == "Be long"  # instructions are not carried over
    assert messages[2]["reasoning_content"].strip() == "hm"
    assert messages[2]["content"].strip() == "I call it."
    assert [call["id"] for call in messages[2]["tool_calls"]] == [call.call_id for call in calls]
    assert [message["tool_call_id"] for message in messages[3:5]] == [call.call_id for call in calls]
    assert len(messages[5]["tool_calls"]) == 2
    forked = await create(served, previous_response_id=first.id, input=results[:1])
    assert [message["role"] for message in engine.requests[3].messages] == ["user", "assistant", "tool"]
    assert forked.previous_response_id == first.id


async def test_what_a_client_sends_back_itself_is_the_same_as_what_is_kept(start: Start) -> None:
    engine = answering(THOUGHT, "I call it.\n", CALL)
    engine.info = StubModel(thinking=ThinkingTags("<think>", "</think>"))
    served = await start(engine)
    first = await create(served, tools=[TOOL], store=False)
    call = next(item for item in first.output if item.type == "function_call")
    output = [{"type": "input_text", "text": "5"}]
    result: Any = {"type": OUTPUT, "call_id": call.call_id, "output": output}
    question: Any = {"role": "user", "content": "Hello there"}
    await create(served, input=[question, *(item.to_dict() for item in first.output), result], tools=[TOOL])
    kept = await create(served, tools=[TOOL])
    call = next(item for item in kept.output if item.type == "function_call")
    result = {**result, "call_id": call.call_id}
    await create(served, previous_response_id=kept.id, input=[result], tools=[TOOL])

    def shown(messages: Any) -> Any:
        text = json.dumps(messages)
        for message in messages:
            for made in message.get("tool_calls", ()):
                text = text.replace(made["id"], "call")
        return text

    assert shown(engine.requests[1].messages) == shown(engine.requests[3].messages)
    with pytest.raises(openai.BadRequestError) as lost:
        await create(served, previous_response_id=first.id)
    assert lost.value.code == "previous_response_not_found"


async def test_a_coding_agents_request_is_served_as_it_comes(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    context = "<environment_context><cwd>/work</cwd></environment_context>"
    body = {
        "model": "stub",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be safe"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": context}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
            {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command":["ls"]}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py"}'},
        ],
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs a command",
                "strict": False,
                "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
    }
    async with served.http.post("/v1/responses", json=body) as response:
        assert response.status == 200
        text = await response.text()
    assert "event: response.completed" in text
    messages = engine.requests[0].messages
    roles = [message["role"] for message in messages]
    assert roles == ["system", "system", "user", "assistant", "tool"]
    assert engine.requests[0].template_options == {"reasoning_effort": "medium"}


async def test_structured_output_is_asked_of_the_engine_and_parsed_by_the_client(start: Start) -> None:
    class Capital(BaseModel):
        name: str

    engine = answering('{"name": ', '"Paris"}')
    served = await start(engine)
    response = await served.openai.responses.parse(model="stub", input="Capital?", text_format=Capital)
    assert response.output_parsed == Capital(name="Paris")
    answer = engine.requests[0].answer
    assert answer.schema["properties"] == {"name": {"title": "Name", "type": "string"}}  # type: ignore[union-attr,index]
    await create(served, tools=[TOOL], tool_choice={"type": "function", "name": "run"})
    assert engine.requests[1].answer.names == ("run",)  # type: ignore[union-attr]


async def test_an_answer_that_is_cut_short_is_incomplete_and_a_call_in_it_is_none(start: Start) -> None:
    served = await start(answering("Well. ", CALL[:40], reason="length"))
    response = await create(served, tools=[TOOL], max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in response.output] == ["message"]
    events = [event.type async for event in await create(served, tools=[TOOL], stream=True)]
    assert events[-1] == "response.incomplete"


async def test_log_probabilities_are_told_where_they_are_included(start: Start) -> None:
    script = [QUEUED, READ, Token(1.0, 1, "Hi", Logprob(1, b"Hi", -0.5)), finished(text="")]
    served = await start(StubEngine(script))
    response = await create(served, include=["message.output_text.logprobs"], top_logprobs=2)
    told = response.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob) for entry in told] == [("Hi", -0.5)]


async def test_progress_is_told_in_events_that_every_client_knows(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    stream = await create(served, stream=True, extra_body={"regrow": {"progress": True}})
    told = [event.model_extra["regrow"] async for event in stream if "regrow" in (event.model_extra or {})]
    assert [facts["phase"] for facts in told] == ["queued", "placed", "mounted", "reading", "decoding"]


async def test_without_generating_the_prompt_is_read_and_can_be_continued(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    prepared = await create(served, extra_body={"generate": False})
    assert (prepared.status, prepared.output, prepared.usage.output_tokens) == ("completed", [], 0)
    assert engine.requests[0].max_tokens == 1
    await create(served, previous_response_id=prepared.id, input="Go on")
    assert [message["content"] for message in engine.requests[1].messages] == ["Hello there", "Go on"]


async def test_a_response_can_be_fetched_its_input_listed_and_forgotten(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    texts = [f"text {number}" for number in range(30)]
    made = await create(served, input=[{"role": "user", "content": text} for text in texts])
    api = served.openai.responses
    assert (await api.retrieve(made.id)).to_dict() == made.to_dict()
    listed = [item.content[0].text async for item in await api.input_items.list(made.id, order="asc")]  # type: ignore[union-attr]
    assert listed == texts
    latest = await api.input_items.list(made.id, limit=2)
    assert [item.content[0].text for item in latest.data] == ["text 29", "text 28"]  # type: ignore[union-attr]
    assert (await api.input_tokens.count(model="stub", input="Hello there")).input_tokens == 2
    await api.delete(made.id)
    for call in (api.retrieve, api.delete, api.cancel, api.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_a_response_in_the_background_is_fetched_until_it_is_there_or_cancelled(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([QUEUED, READ, TOKENS[0], hold, *TOKENS[1:], finished()])
    served = await start(engine)
    api = served.openai.responses
    one, other = [await create(served, background=True) for _ in range(2)]
    assert one.status == other.status == "in_progress"
    assert (await api.cancel(one.id)).status == "cancelled"
    hold.gate.set()
    async with asyncio.timeout(IN_TIME):
        while (made := await api.retrieve(other.id)).status == "in_progress":
            pass
        while (gone := await api.retrieve(one.id)).status == "in_progress":
            pass
    assert made.output_text == TEXT
    assert gone.status == "cancelled"
    assert (await api.cancel(other.id)).status == "completed"
    with pytest.raises(openai.BadRequestError) as running:
        engine.script = [QUEUED, Hold()]
        await create(served, previous_response_id=(await create(served, background=True)).id)
    assert running.value.code == "previous_response_not_found"


async def test_a_stream_that_is_cancelled_elsewhere_ends_and_says_so(start: Start) -> None:
    engine = StubEngine([QUEUED, READ, TOKENS[0], Hold()])
    served = await start(engine)
    stream = await create(served, stream=True)
    name = ""
    async for event in stream:
        if event.type == "response.created":
            name = event.response.id
        if event.type == "response.output_text.delta":
            await served.openai.responses.cancel(name)
    assert event.type == "response.incomplete"
    assert event.response.status == "cancelled"
    assert event.response.output_text == TOKENS[0].text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "another"}, "model"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True, "stream": True}, "background"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_its_name(
    start: Start, engine: StubEngine, fields: dict[str, Any], param: str
) -> None:
    served = await start(engine)
    status, body = await served.post({"model": "stub", "input": "Hello there", **fields}, "/v1/responses")
    assert status == (404 if param == "model" else 400)
    assert body["error"]["param"] == param


async def test_errors_before_and_after_the_first_event(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    engine.refuse_with = Overloaded("the queue is full", 7)
    with pytest.raises(openai.RateLimitError) as full:
        await create(served, stream=True)
    assert full.value.response.headers["Retry-After"] == "7"
    engine.refuse_with = None
    engine.script = [QUEUED, READ, TOKENS[0], failed(DeviceFailed("the device broke"))]
    with pytest.raises(openai.InternalServerError):
        await create(served)
    last = [event async for event in await create(served, stream=True)][-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "device_failed"
    engine.script = [QUEUED, ValueError("a secret")]
    raw = await served.http.post("/v1/responses", json={"input": "Hello", "stream": True})
    text = await raw.text()
    assert "event: error" in text
    assert "secret" not in text


async def test_what_the_engine_refuses_is_named_as_it_is_called_here(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    field = "response_format.json_schema.schema.properties.a"
    engine.refuse_with = BadRequest(f"{field}: not is not enforced", param=field)
    with pytest.raises(openai.BadRequestError) as refused:
        await create(served)
    assert refused.value.param == "text.format.schema.properties.a"
    assert "text.format.schema.properties.a: not" in refused.value.message


async def test_a_client_that_leaves_ends_its_response(start: Start) -> None:
    engine = StubEngine([QUEUED, READ, TOKENS[0], Hold()])
    served = await start(engine)
    stream = await create(served, stream=True)
    run = await engine.started.get()
    created = await anext(stream.__aiter__())
    await stream.close()
    async with asyncio.timeout(IN_TIME):
        await run.cancelled.wait()
        while (left := await served.openai.responses.retrieve(created.response.id)).status == "in_progress":
            pass
    assert left.status == "cancelled"
    engine.script = [QUEUED, READ, *TOKENS, finished()]
    await create(served, previous_response_id=left.id)  # what was said is kept


async def test_what_is_forgotten_while_it_is_made_stays_forgotten(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([QUEUED, READ, hold, *TOKENS, finished()])
    served = await start(engine)
    made = await create(served, background=True)
    await served.openai.responses.delete(made.id)
    hold.gate.set()
    await create(served)
    async with asyncio.timeout(IN_TIME):
        while not engine.runs[0].ended:
            await create(served)
    with pytest.raises(openai.NotFoundError):
        await served.openai.responses.retrieve(made.id)


def test_of_too_many_responses_the_oldest_leave_and_none_is_larger_than_all() -> None:
    store = ResponseStore(3, 1000)
    for name in "abcd":
        store.put(name, Kept({"text": name}, (), (), 15, 5))
    assert [store.get(name) is not None for name in "abcd"] == [False, True, True, True]
    store.put("b", Kept({}, (), (), 90, 900))
    assert [store.get(name) is not None for name in "bcd"] == [True, False, False]
    store.put("e", Kept({}, (), (), 1, 1000))
    assert len(store) == 0


async def test_what_a_chain_holds_is_counted_without_the_bodies_of_the_responses_before(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    store = served.app[STORE]
    name, sizes = None, []
    for number in range(3):
        text = f"{number} " * 100
        name = (await create(served, previous_response_id=name, input=text, instructions="x" * 5000)).id
        kept = store.get(name)
        assert kept is not None
        assert kept.history_bytes == pytest.approx(len(msgspec.json.encode(kept.history)), abs=20)
        assert kept.body_bytes == len(msgspec.json.encode(kept.body))
        sizes.append(kept.nbytes)
    assert sizes[2] - sizes[0] < 2 * 600


def test_items_become_the_messages_that_they_were_made_from() -> None:
    given: list[dict[str, object]] = [
        {"role": "developer", "content": "Be brief"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "run", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "c"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "left alone"}]},
        {"role": "user", "content": "d"},
    ]
    messages = messages_of(items_of(given, ()))
    told = [(m.role, m.content, m.reasoning_content, len(m.tool_calls or ())) for m in messages]
    assert told == [
        ("developer", "Be brief", None, 0),
        ("assistant", "", "a", 1),
        ("assistant", "b", None, 0),
        ("assistant", "c", None, 0),
        ("user", "d", None, 0),
    ]
    assert messages_of([Said(role="user", content="x")])[0].content == "x"
