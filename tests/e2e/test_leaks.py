"""A real server after many requests of every kind: no more threads, files and sockets, and memory is flat."""

import asyncio
import os
from pathlib import Path
from random import Random

import aiohttp

from tests.e2e.server import Client, Server, serving
from tests.long_form import many

REQUESTS = many(100, long=2000)
MODEL = "random:qwen3_5"
CLIENTS = 8
OPTIONS = ("--parallel", "2", "--threads", "1", "--ctx", "2048", "--cache-mib", "8", "--queue", "64")
GROWTH = 1.15  # of the resident memory: allocators keep what they had


def held_by(server: Server) -> tuple[int, int, int]:
    """Return the threads and open files of the server, and its resident pages."""
    process = Path(f"/proc/{server.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return len(os.listdir(process / "task")), len(os.listdir(process / "fd")), pages  # noqa: PTH208


async def one(http: aiohttp.ClientSession, rng: Random) -> None:
    """A request that is answered, refused, streamed, left at once, or left while it streams."""
    kind = rng.choice(["whole", "stream", "leaves", "leaves early", "too long", "wrong"])
    messages = [{"role": "user", "content": f"{rng.randrange(40)} " * (3000 if kind == "too long" else 30)}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "stream": kind in ("stream", "leaves")}
    if kind == "wrong":
        body["temperature"] = "hot"
    try:
        async with asyncio.timeout(0.01 if kind == "leaves early" else None):
            async with http.post("/v1/chat/completions", json=body) as response:
                if kind == "leaves":
                    await response.content.readline()
                    response.close()
                    return
                text = await response.text()
                assert response.status == (400 if kind in ("too long", "wrong") else 200), text
    except TimeoutError:
        assert kind == "leaves early"


async def live(client: Client, seed: int, requests: int) -> None:
    rng = Random(seed)

    async def some() -> None:
        for _ in range(requests // CLIENTS):
            await one(client.http, rng)

    await asyncio.gather(*(some() for _ in range(CLIENTS)))
    await client.until(lambda s: s["engine"]["running"] == s["engine"]["waiting"] == 0)


async def test_after_many_requests_of_every_kind_nothing_is_left_of_them() -> None:
    with serving(MODEL, *OPTIONS) as server:
        async with server.client() as client:
            await live(client, 1, 80)
        threads, files, pages = held_by(server)
        async with server.client() as client:
            await live(client, 2, REQUESTS)
            status = await client.status()
        assert all(slot["phase"] == "idle" for slot in status["slots"])
        assert status["cache"]["pinned"] == 0
        assert all(box["waiting"] == 0 and box["restarts"] == 0 for box in status["mailboxes"])
        async with server.client() as client:
            await client.until(lambda _: held_by(server)[1] <= files + 1)  # this client's own socket
        after = held_by(server)
        assert after[0] <= threads
        assert after[2] <= pages * GROWTH
