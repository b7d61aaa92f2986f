"""Logs are structured, carry the request's id, and hold no text of prompts or answers."""

import asyncio
import json
import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import structlog
from yarl import URL

from regrow.api.logs import configure_logs
from tests.actors.world import House, house
from tests.api.conftest import Start, chat_body
from tests.api.stub import TEXT, TOKENS, StubEngine
from tests.world.loop import VirtualLoop, run_world
from tests.world.wire import Site, site

SECRET = "my secret plan"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**before)
    root.handlers[:], root.level = handlers, level
    logging.getLogger("regrow").setLevel(logging.NOTSET)


async def test_a_request_is_one_line_with_its_facts_and_no_text(
    start: Start, engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", as_json=True)
    served = await start(engine)
    headers = {"X-Request-Id": "mine"}
    body = chat_body(messages=[{"role": "user", "content": SECRET}])
    async with served.http.post("/v1/chat/completions", json=body, headers=headers):
        pass
    await served.get("/health")
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry.pop("ms") >= 0
    assert entry.pop("timestamp")
    assert entry == {
        "event": "http",
        "level": "info",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "request_id": "mine",
        "request": "run-0",
    }


async def test_what_probes_and_the_page_ask_again_and_again_is_no_line_but_forgetting_is(
    start: Start, engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", as_json=True)
    served = await start(engine)
    for path in ("/health", "/ready", "/v1/status", "/v1/cache"):
        assert (await served.get(path))[0] == 200
    async with served.http.delete("/v1/cache"):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["method"], json.loads(line)["path"]) == ("DELETE", "/v1/cache")


async def test_a_path_cannot_forge_lines_nor_paint_the_terminal(
    start: Start, engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", as_json=False)
    served = await start(engine)
    async with served.http.get(URL("/v1/%0A2026%1B%5B31m", encoded=True)) as response:
        assert response.status == 404
    err = capsys.readouterr().err
    assert "path=/v1/%0A2026%1B%5B31m" in err
    assert err.count("\n") == 1


async def test_a_client_that_leaves_at_the_last_event_has_had_its_answer(
    start: Start, engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", as_json=True)
    served = await start(engine)
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        async for line in response.content:
            if b"[DONE]" in line:
                response.close()
                break
    await served.get("/v1/models")
    assert [json.loads(line)["status"] for line in capsys.readouterr().err.splitlines()] == [200, 200]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_is_logged_with_a_traceback_and_no_text(
    start: Start, capsys: pytest.CaptureFixture[str], as_json: bool, stream: bool
) -> None:
    configure_logs("info", as_json)
    served = await start(StubEngine([*TOKENS, ValueError("broken inside")]))
    body = chat_body(messages=[{"role": "user", "content": SECRET}], stream=stream)
    async with served.http.post("/v1/chat/completions", json=body) as response:
        await response.read()
    err = capsys.readouterr().err
    assert "ValueError: broken inside" in err
    assert SECRET not in err
    assert TEXT[:5] not in err


@pytest.mark.parametrize("as_json", [False, True])
def test_whatever_becomes_of_a_request_no_line_from_info_on_holds_any_text_of_it(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    secrets = {
        "cache_salt": SECRET,
        "user": SECRET,
        "stop": [f"{SECRET}, stop"],
        "tools": [{"type": "function", "function": {"name": "f", "description": SECRET}}],
    }

    async def asks(house: House, server: Site) -> None:
        """Ask what is answered, refused, cut off, left, and ended by a crash; the same text in each."""
        for fields in ({}, {"stream": False}, secrets, {"top_k": SECRET}, {"model": SECRET}):
            await server.chat(SECRET, **fields).end()
        await server.chat(f"{SECRET}, but differently").end()
        await server.chat(SECRET * 1000).end()
        await server.chat(SECRET, max_tokens=500, regrow={"deadline_ms": 300}).end()
        raw = {"model": "world", "prompt": [SECRET, f"{SECRET}!"], "echo": True, "logprobs": 2}
        await server.call("POST", "/v1/completions", raw).end()
        for path in ("/tokenize", "/apply-template"):
            messages = [{"role": "user", "content": SECRET}]
            await server.call("POST", path, {"messages": messages}).end()
        left, crashed = [server.chat(SECRET * 3, max_tokens=500) for _ in range(2)]
        await asyncio.sleep(0.5)
        left.leave()
        await asyncio.sleep(0.5)
        for name in ("slot-0", "slot-1"):
            house.crash(name)
        await crashed.end()

    async def lived(world: VirtualLoop) -> None:
        async with house(world, rests=False) as opened, site(opened.engine) as served:
            await asks(opened, served)

    configure_logs("info", as_json)
    run_world(0, lived)
    err = capsys.readouterr().err
    for said in ("length", "DeadlineExceeded", "cancelled", "TypeError", "400", "404", "Traceback"):
        assert said in err, said
    assert "secret" not in err


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n{my secret plan}\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nmy secret plan\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-api key: my secret plan\r\n\r\n",
        b"GET /" + b"my secret plan" * 1000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_told_to_its_sender_alone(
    start: Start, engine: StubEngine, capsys: pytest.CaptureFixture[str], sent: bytes
) -> None:
    configure_logs("info", as_json=True)
    served = await start(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(served.url).port)
    writer.write(sent)
    assert b" 400 " in await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert "secret" not in capsys.readouterr().err


def test_the_level_is_for_regrow_and_others_are_heard_from_warnings_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("debug", as_json=True)
    structlog.get_logger("regrow.x").debug("ours")
    logging.getLogger("other").info("theirs")
    logging.getLogger("other").warning("their warning")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == [
        "ours",
        "their warning",
    ]
    configure_logs("error", as_json=False)
    structlog.get_logger("regrow.x").info("nothing")
    assert capsys.readouterr().err == ""
