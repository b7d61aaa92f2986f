"""Logs are structured, carry the request's id, and hold no text of prompts or answers."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from regrow.api.logs import configure_logs
from tests.api.conftest import Start, chat_body
from tests.api.stub import TEXT, TOKENS, StubEngine

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
