"""A client that goes away frees what it held, in every phase, streaming or not."""

import asyncio
import logging

import pytest
from aiohttp import ClientConnectionResetError, ClientError, web

from tests.api.conftest import Start, chat_body
from tests.api.stub import MOUNTED, PLACED, PROGRESS, QUEUED, READ, TOKENS, Hold, StubEngine, finished

PHASES = {
    "queued": [QUEUED],
    "reading": [QUEUED, PLACED, MOUNTED, PROGRESS],
    "decoding": [QUEUED, PLACED, MOUNTED, PROGRESS, READ, *TOKENS],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_goes_away_ends_its_run(start: Start, phase: str, stream: bool) -> None:
    engine = StubEngine([*PHASES[phase], Hold(), finished()])
    served = await start(engine, keepalive_s=60.0)
    client = asyncio.create_task(served.post(chat_body(stream=stream)))
    run = await engine.started.get()
    await run.waiting.wait()
    client.cancel()
    await run.cancelled.wait()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_goes_away_while_the_engine_takes_its_request_ends_its_run(
    start: Start, stream: bool
) -> None:
    engine = StubEngine([Hold(), finished()])
    engine.submit_gate.clear()
    served = await start(engine)
    client = asyncio.create_task(served.post(chat_body(stream=stream)))
    await engine.submitting.wait()
    client.cancel()
    await asyncio.wait([client])
    engine.submit_gate.set()
    run = await engine.started.get()
    await run.cancelled.wait()


async def test_a_client_that_goes_away_while_a_piece_is_written_is_no_error_of_the_server(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = web.StreamResponse.write

    async def broken(response: web.StreamResponse, data: bytes) -> None:
        request = response._req
        if isinstance(response, web.Response) or b"dir" not in data or request is None:
            return await whole(response, data)
        assert request.transport is not None
        request.transport.abort()
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", broken)
    engine = StubEngine([*PHASES["decoding"], finished()])
    served = await start(engine)
    with pytest.raises(ClientError):
        await served.post(chat_body(stream=True))
    run = await engine.started.get()
    await run.cancelled.wait()
    monkeypatch.undo()
    assert (await served.post(chat_body()))[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_goes_away_disturbs_no_other(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([*TOKENS, hold, finished()])
    served = await start(engine)
    leaving = asyncio.create_task(served.post(chat_body(stream=True)))
    left = await engine.started.get()
    staying = asyncio.create_task(served.post(chat_body()))
    stayed = await engine.started.get()
    leaving.cancel()
    await left.cancelled.wait()
    hold.gate.set()
    status, answer = await staying
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Grüße dir!")
    assert not stayed.cancelled.is_set()


async def test_the_official_client_can_leave_a_stream(start: Start) -> None:
    engine = StubEngine([*TOKENS, Hold(), finished()])
    served = await start(engine)
    stream = await served.openai.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "x"}], stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    run = await engine.started.get()
    await run.cancelled.wait()
