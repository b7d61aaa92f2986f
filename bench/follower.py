"""A client in a process of its own, light enough to be started often: reads streams to their ends."""

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import ClientSession


async def follow_elsewhere(url: str, streams: int, tokens: int) -> int:
    """Have another process read so many streams of so many tokens at once; return how many tokens came."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import follower; follower.main()", url, str(streams), str(tokens)),
        cwd=Path(__file__).parent,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await client.communicate()
    return int(out)


def main() -> None:
    url, streams, tokens = sys.argv[1:]
    print(asyncio.run(follow(url, int(streams), int(tokens))))


async def follow(url: str, streams: int, tokens: int) -> int:
    """Read streams to their ends; return how many tokens they had."""
    body = {
        "messages": [{"role": "user", "content": "Tell."}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }

    async def one(session: ClientSession, model: str) -> int:
        async with session.post(f"{url}/v1/chat/completions", json={**body, "model": model}) as response:
            response.raise_for_status()
            *_, last, _done = filter(None, (await response.read()).split(b"\n\n"))
            return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])

    async with ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        return sum(await asyncio.gather(*(one(session, model) for _ in range(streams))))
