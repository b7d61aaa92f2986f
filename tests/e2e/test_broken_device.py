"""The real server with a device that breaks: every request ends by name; a storm of restarts ends the process
with its reason, a hang ends in another thread."""

import asyncio
import sys
from pathlib import Path

import openai
import pytest

from tests.e2e.server import serving
from tests.e2e.talk import ask

HELLO = [{"role": "user", "content": "Hello"}]
BROKEN = [sys.executable, str(Path(__file__).with_name("broken_server.py"))]
OPTIONS = ("--parallel", "1", "--threads", "1", "--ctx", "512")


async def test_a_storm_of_device_errors_ends_the_process_with_1_and_the_reason() -> None:
    with serving("random:llama", *OPTIONS, command=[*BROKEN, "fails"]) as server:
        async with server.client() as client:
            for _ in range(4):
                with pytest.raises(openai.InternalServerError, match="device"):
                    await ask(client, server.model, HELLO)
        assert await asyncio.to_thread(server.process.wait, 60) == 1
        server.errors.seek(0)
        last = server.errors.read().splitlines()[-1]
        assert last.startswith("regrow: the engine has given up: device crashed 4 times within 60 s")
        assert last.endswith("the bus fell off")


async def test_a_device_that_hangs_ends_its_request_by_name_and_the_next_one_is_answered() -> None:
    with serving("random:llama", *OPTIONS, "--hang-s", "10", command=[*BROKEN, "hangs"]) as server:
        async with server.client() as client:
            with pytest.raises(openai.InternalServerError, match="the device hangs"):
                await ask(client, server.model, HELLO)
            turn = await ask(client, server.model, HELLO)
            assert turn.text
        server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, 60) == 0
