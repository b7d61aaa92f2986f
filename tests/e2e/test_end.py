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
