"""The end of a server: what runs is finished, nothing new is taken, and the process exits with 0."""

import asyncio

import openai
import pytest

from tests.e2e.server import serving
from tests.e2e.streams import streaming
from tests.e2e.talk import ask

HELLO = [{"role": "user", "content": "Hello"}]


async def test_sigterm_lets_what_runs_finish_then_the_process_exits_with_0_and_no_complaint() -> None:
    with serving("random:qwen3_5", "--parallel", "1", "--threads", "1") as server:
        async with server.client() as client:
            async with streaming(client, server.model, HELLO, max_tokens=300) as stream:
                await stream.tokens(1)
                server.process.terminate()
                while (await client.http.get("/ready")).status == 200:
                    pass
                with pytest.raises(openai.InternalServerError) as refused:
                    await ask(client, server.model, HELLO)
                await stream.end()
            assert refused.value.status_code == 503
            assert refused.value.code == "draining"
            assert stream.reason == "length"
        assert await asyncio.to_thread(server.process.wait) == 0
        server.errors.seek(0)
        assert server.errors.read() == ""


async def test_what_takes_longer_than_the_drain_is_ended_with_an_error_and_the_process_exits_with_0() -> None:
    options = ("--parallel", "1", "--threads", "1", "--drain-s", "0.2")
    with serving("random:qwen3_5", *options) as server:
        async with server.client() as client:
            async with streaming(client, server.model, HELLO, max_tokens=30_000) as stream:
                waiting = asyncio.create_task(ask(client, server.model, HELLO))
                await stream.tokens(1)
                await client.until(lambda status: status["engine"]["waiting"] == 1)
                server.process.terminate()
                with pytest.raises(openai.APIError, match="shutting down"):
                    await stream.end()
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await waiting
        assert await asyncio.to_thread(server.process.wait) == 0
        server.errors.seek(0)
        assert server.errors.read() == ""
