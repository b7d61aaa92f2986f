"""The WebSocket mode of the Responses API with a scripted engine, through the official client."""

import asyncio
import json
from typing import Any

import openai
import pytest
import websockets
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits

from regrow.actors.events import Token
from regrow.errors import DeviceFailed, Draining
from tests.api.conftest import Served, Start
from tests.api.stub import QUEUED, READ, TEXT, TOKENS, Hold, StubEngine, failed, finished
from tests.api.test_responses import CALL, IN_TIME, OUTPUT, TOOL, answering

LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=500, max_events=500, max_bytes_per_lane=1 << 22, max_bytes=1 << 22
)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def until_end(connection: Any, lane: str | None = None) -> Any:
    """Hear events up to the end of a response (of this lane); returns the last one."""
    async with asyncio.timeout(IN_TIME):
        while True:
            event = await connection.recv()
            if event.type in ENDS and getattr(event, "stream_id", None) == lane:
                return event


async def made(connection: Any, **fields: Any) -> Any:
    """Make one response."""
    await connection.response.create(**{"model": "stub", "input": "Hello there", **fields})
    return (await until_end(connection, fields.get("stream_id"))).response


async def test_a_response_is_told_as_over_http(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        await connection.response.create(model="stub", input="Hello there")
        events = []
        while not events or events[-1].type != "response.completed":
            events.append(await connection.recv())
    stream = await served.openai.responses.create(model="stub", input="Hello there", stream=True)
    assert [event.type for event in events] == [event.type async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == TEXT


async def test_each_turn_says_only_what_is_new_and_any_response_can_be_continued(start: Start) -> None:
    engine = answering("I call it.\n", CALL)
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        first = await made(connection, tools=[TOOL], store=False, instructions="Be brief")
        previous = first
        for number in range(3):
            call = next(item for item in previous.output if item.type == "function_call")
            news: Any = [{"type": OUTPUT, "call_id": call.call_id, "output": str(number)}]
            fields = {"input": news, "tools": [TOOL], "store": False}
            previous = await made(connection, previous_response_id=previous.id, **fields)
        fork = await made(connection, previous_response_id=first.id, input="Never mind", store=False)
    roles = [[message["role"] for message in request.messages] for request in engine.requests]
    assert roles[3] == ["user", *["assistant", "tool"] * 3]
    outputs = [message["content"] for message in engine.requests[3].messages if message["role"] == "tool"]
    assert outputs == ["0", "1", "2"]
    assert roles[4] == ["user", "assistant", "user"]
    assert fork.previous_response_id == first.id


async def test_what_a_connection_did_not_store_is_gone_with_it_and_what_it_stored_is_not(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        gone = await made(connection, store=False)
        kept = await made(connection)
    async with served.openai.responses.connect() as connection:
        await connection.response.create(model="stub", input="Go on", previous_response_id=gone.id)
        error: Any = await until_end(connection)
        assert (error.status, error.error.code) == (400, "previous_response_not_found")
        assert error.error.param == "previous_response_id"
        again = await made(connection, input="Go on", previous_response_id=kept.id)
    assert again.previous_response_id == kept.id
    assert len(engine.requests[-1].messages) == 3


async def test_lanes_run_beside_each_other_and_each_in_order(start: Start) -> None:
    holds = {name: Hold() for name in ("a", "b")}
    scripts = {
        f"{name} {number}": [QUEUED, READ, hold, Token(1.0, 1, f"{name}{number}"), finished(text="")]
        for name, hold in holds.items()
        for number in range(2)
    }
    engine = StubEngine(scripts)
    served = await start(engine)
    async with (
        served.openai.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes = {name: session.lane(name) for name in holds}
        for name, lane in lanes.items():
            await lane.send({"type": "response.create", "model": "stub", "input": f"{name} 0"})
        runs = [await engine.started.get() for _ in lanes]
        assert len(runs) == 2
        await connection.response.create(model="stub", input="a 1", stream_id="a")
        holds["b"].gate.set()
        assert (await lanes["b"].get_final_response()).output_text == "b0"
        assert engine.started.empty()  # lane a has not come to its second one
        holds["a"].gate.set()
        assert (await lanes["a"].get_final_response()).output_text == "a0"
        run = await engine.started.get()
        assert " ".join(str(m["content"]) for m in engine.requests[-1].messages) == "a 1"
        assert run is engine.runs[-1]


async def test_errors_name_the_lane_and_end_nothing_else(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        await connection.response.create(model="another", input="Hello", stream_id="x")
        error: Any = await until_end(connection, "x")
        assert (error.status, error.error.code, error.stream_id) == (404, "model_not_found", "x")
        for message, param in (
            ({"type": "dance"}, "type"),
            ({"type": "response.create", "input": 5}, "input"),
        ):
            await connection.send_raw(json.dumps(message))
            assert (await until_end(connection)).error.param == param
        await connection.response.create(model="stub", input="Hello", background=True)
        assert (await until_end(connection)).error.param == "background"
        engine.refuse_with = Draining("the server is shutting down")
        await connection.response.create(model="stub", input="Hello there")
        assert (await until_end(connection)).error.code == "draining"
        engine.refuse_with = None
        engine.script = [QUEUED, READ, failed(DeviceFailed("the device broke"))]
        broken = await made(connection)
        assert (broken.status, broken.error.code) == ("failed", "device_failed")
        engine.script = [QUEUED, ValueError("a secret")]
        await connection.response.create(model="stub", input="Hello there")
        assert (await until_end(connection)).error.code == "internal_error"
        engine.script = [QUEUED, READ, *TOKENS, finished()]
        assert (await made(connection)).output_text == TEXT


async def test_an_unexpected_error_does_not_lose_what_waits_behind_it(start: Start) -> None:
    hold = Hold()
    life = [QUEUED, READ, *TOKENS, finished()]
    served = await start(StubEngine({"bad": [QUEUED, hold, ValueError("a secret")], "good": life}))
    async with served.openai.responses.connect() as connection:
        for text in ("bad", "good"):
            await connection.response.create(model="stub", input=text)
        hold.gate.set()
        assert (await until_end(connection)).error.code == "internal_error"
        assert (await until_end(connection)).response.output_text == TEXT


async def test_a_response_cannot_be_steered_and_says_so(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        await connection.response.steer(input="Stop", previous_response_id="resp_x")
        event: Any = await connection.recv()
    assert (event.type, event.error.code) == ("response.steer.failed", "steering_not_supported")


async def test_a_connection_that_is_lost_ends_its_responses(start: Start) -> None:
    engine = StubEngine([QUEUED, READ, TOKENS[0], Hold()])
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        for lane in ("a", "b"):
            await connection.response.create(model="stub", input="Hello there", stream_id=lane)
        runs = [await engine.started.get() for _ in range(2)]
    for run in runs:
        async with asyncio.timeout(IN_TIME):
            await run.cancelled.wait()


async def test_a_response_of_a_connection_can_be_cancelled_over_http(start: Start) -> None:
    engine = StubEngine([QUEUED, READ, TOKENS[0], Hold()])
    served = await start(engine)
    async with served.openai.responses.connect() as connection:
        await connection.response.create(model="stub", input="Hello there")
        created: Any = await connection.recv()
        await served.openai.responses.cancel(created.response.id)
        assert (await until_end(connection)).response.status == "cancelled"


async def test_not_too_many_responses_wait_on_a_connection(start: Start) -> None:
    served = await start(StubEngine([QUEUED, Hold()]))
    async with served.openai.responses.connect() as connection:
        for _ in range(129):
            await connection.response.create(model="stub", input="Hello there")
        error: Any = await until_end(connection)
        assert (error.status, error.error.code) == (429, "overloaded")


async def test_the_clients_key_is_asked_for(start: Start, engine: StubEngine) -> None:
    served = await start(engine, api_keys=("secret",))
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with served.openai.responses.connect():
            pass
    assert refused.value.response.status_code == 401
    async with (
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="secret") as client,
        client.responses.connect() as connection,
    ):
        assert (await made(connection)).output_text == TEXT
    assert (await _first_message(served)) == {"type": "authorized"}


async def _first_message(served: Served) -> Any:
    """Show the key as a page has to."""
    async with served.http.ws_connect("/v1/responses") as ws:
        await ws.send_json({"type": "auth", "key": "secret"})
        return await ws.receive_json(timeout=IN_TIME)
