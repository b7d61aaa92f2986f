"""kill -9 of the real server under load, again and again on one cache directory: each time it starts, and its
answers are those of a server that keeps nothing, and what is on disk is whole."""

import asyncio
import contextlib
from pathlib import Path
from random import Random

import aiohttp
import openai

from tests.e2e.server import Client, regrow, serving
from tests.e2e.talk import ask
from tests.long_form import many

KILLS = many(3, long=20)
MODEL = "random:qwen3_5"
OPTIONS = ("--parallel", "2", "--threads", "1", "--ctx", "2048", "--exact", "full", "--chunk", "64")
CHATS, TURNS = 4, 3
LONGEST_S = 1.5  # that it lives once something is on disk


def messages(chat: int, turn: int) -> list[dict[str, str]]:
    said = [{"role": "system", "content": f"You are number {chat % 2}. " * 15}]
    for n in range(turn + 1):
        said.append({"role": "user", "content": f"chat {chat} asks {n} " * 5})
        if n < turn:
            said.append({"role": "assistant", "content": f"the answer {n}"})
    return said


async def truth(client: Client) -> dict[tuple[int, int], str]:
    never = {"regrow": {"cache": "off"}, "max_tokens": 4}
    turns = [(chat, turn) for chat in range(CHATS) for turn in range(TURNS)]
    return {(c, t): (await ask(client, MODEL, messages(c, t), **never)).text for c, t in turns}


async def live(client: Client, answers: dict[tuple[int, int], str], seed: int, told: list[str]) -> None:
    """Ask until the server is gone; every answer that comes is the true one."""
    rng = Random(seed)
    with contextlib.suppress(openai.APIConnectionError, aiohttp.ClientError):
        while True:
            which = rng.randrange(CHATS), rng.randrange(TURNS)
            turn = await ask(client, MODEL, messages(*which), max_tokens=4)
            assert turn.text == answers[which]
            told.append(turn.regrow["source"])


async def test_a_server_that_is_killed_under_load_starts_again_and_answers_truly(tmp_path: Path) -> None:
    rng, answers, told = Random(1), {}, list[str]()
    for life in range(KILLS + 1):
        with serving(MODEL, *OPTIONS, "--cache-dir", str(tmp_path)) as server:
            async with server.client() as client:
                answers = answers or await truth(client)
                talking = [live(client, answers, 100 * life + n, told) for n in range(3)]
                crowd = asyncio.gather(*talking)
                await client.until(lambda status: status["disk"]["counters"]["records"] > 0)
                asyncio.get_running_loop().call_later(rng.uniform(0, LONGEST_S), server.process.kill)
                await asyncio.wait_for(crowd, 120)
            assert await asyncio.to_thread(server.process.wait) == -9
        verify = regrow("cache", "verify", "--cache-dir", str(tmp_path))
        verified = await asyncio.create_subprocess_exec(*verify, stdout=asyncio.subprocess.PIPE)
        broken, _ = await verified.communicate()
        assert verified.returncode == 0, broken
    assert len(told) > KILLS
    assert "disk" in told
