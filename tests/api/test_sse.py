"""Event streams: never silent for long, in any phase, and never ahead of what the client reads."""

import asyncio
from collections.abc import Mapping

import pytest
from aiohttp.abc import AbstractStreamWriter
from aiohttp.test_utils import make_mocked_request

from regrow.api.sse import EventStream
from tests.api.conftest import Start, chat_body
from tests.api.stub import PLACED, PROGRESS, QUEUED, READ, TOKENS, Hold, StubEngine, finished
from tests.world.loop import VirtualLoop, run_world

KEEP_ALIVE = b": keep-alive\n"
NO_DELAY: Mapping[bytes, float] = {}
PHASES = {
    "taken": [],
    "queued": [QUEUED],
    "placed": [QUEUED, PLACED],
    "reading": [QUEUED, PLACED, PROGRESS],
    "decoding": [QUEUED, PLACED, PROGRESS, READ, *TOKENS],
    "behind a parser": [READ, TOKENS[1]],
}


@pytest.mark.parametrize("phase", PHASES)
async def test_a_silent_stream_gets_comments_in_every_phase(start: Start, phase: str) -> None:
    hold = Hold()
    served = await start(StubEngine([*PHASES[phase], hold, finished()]), keepalive_s=0.01)
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        comments = 0
        async for line in response.content:
            comments += line == KEEP_ALIVE
            if comments == 3:
                hold.gate.set()
    assert comments >= 3
    assert line == b"\n"


async def test_headers_go_out_before_the_first_event(start: Start) -> None:
    hold = Hold()
    engine = StubEngine([hold, finished()])
    served = await start(engine, keepalive_s=60.0)
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        assert response.status == 200
        run = await engine.started.get()
        assert not run.ended
        hold.gate.set()
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_a_stream_that_is_never_silent_gets_no_comments(start: Start, engine: StubEngine) -> None:
    served = await start(engine, keepalive_s=60.0)
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        assert KEEP_ALIVE not in await response.read()


async def test_a_client_that_does_not_read_stops_its_writer_and_not_the_server(start: Start) -> None:
    engine = StubEngine([*[TOKENS[0]] * 200_000, finished()])
    served = await start(engine)
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        run = await engine.started.get()
        assert (await served.get("/health"))[0] == 200
        assert not run.ended
        response.close()
    await run.cancelled.wait()


class Recorder(AbstractStreamWriter):
    """A connection in virtual time: notes when frames are written; a frame may take its time."""

    def __init__(self, world: VirtualLoop, slow: Mapping[bytes, float]) -> None:
        self._world = world
        self._slow = slow

    async def write(self, chunk: bytes) -> None:
        frame = chunk.strip()
        self._world.note(frame.decode())
        await asyncio.sleep(self._slow.get(frame, 0.0))

    async def write_eof(self, chunk: bytes = b"") -> None:
        self._world.note("end")

    async def write_headers(self, status_line: str, headers: object) -> None:
        self._world.note("headers")

    async def drain(self) -> None: ...

    def enable_compression(self, *_: object, **__: object) -> None: ...

    def enable_chunking(self) -> None: ...


def written(events: list[tuple[float, bytes]], slow: Mapping[bytes, float] = NO_DELAY) -> object:
    """Send each event after its pause, on a stream that keeps alive every 5 s; returns (time, frame)."""

    async def scenario(world: VirtualLoop) -> object:
        request = make_mocked_request("POST", "/", writer=Recorder(world, slow))
        async with EventStream(request, 5.0) as stream:
            for pause, data in events:
                await asyncio.sleep(pause)
                await stream.send(data)
            await stream.end(b"bye")
        return world.trace

    return run_world(0, scenario)


def test_a_comment_comes_after_the_interval_since_the_last_write_and_not_before() -> None:
    assert written([(4.0, b"a"), (4.0, b"b"), (12.0, b"c")]) == [
        (0.0, "headers"),
        (4.0, "data: a"),
        (8.0, "data: b"),
        (13.0, ": keep-alive"),
        (18.0, ": keep-alive"),
        (20.0, "data: c"),
        (20.0, "data: bye"),
        (20.0, "end"),
    ]


def test_a_write_that_waits_for_the_client_is_not_followed_by_comments_in_arrears() -> None:
    assert written([(1.0, b"a"), (0.0, b"b"), (6.0, b"c")], {b"data: a": 30.0}) == [
        (0.0, "headers"),
        (1.0, "data: a"),
        (31.0, "data: b"),
        (36.0, ": keep-alive"),
        (37.0, "data: c"),
        (37.0, "data: bye"),
        (37.0, "end"),
    ]
