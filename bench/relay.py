"""What the relay adds to a request and to each piece of a stream, against going straight to the upstream.

Upstream, relay and client are three processes on this machine; requests go straight and through the relay in
turn. A piece of a stream carries the time at which it was sent. The last rows have a chat whose cached prefix
has expired, so that its old tool results are shortened on every request.
"""

import asyncio
import json
import multiprocessing
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

import harness

STAMP = struct.Struct("!d")
PIECES, PIECE_S = 50, 0.004
ANSWER = b'{"usage": {"input_tokens": 1, "output_tokens": 1}}'
SYSTEM = "You are a coding agent. " * 800
OUTPUT = "\n".join(f"src/file_{i}.py: checked {i} names in {i} ms" for i in range(80))
FILE = "cold_prefix_touch.json"


def chat(turns: int) -> bytes:
    """Return the body of an agent's chat with so many tool calls, about 4 KB each."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Go through the files."}]
    for turn in range(turns):
        call = {"type": "tool_use", "id": f"t{turn}", "name": "run", "input": {"command": "check"}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"{turn}\n{OUTPUT}"}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": "claude-sonnet-4-5", "system": SYSTEM, "messages": messages}
    return json.dumps({**body, "cache_control": {"type": "ephemeral"}}).encode()


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer at once, or with a stream of pieces that say when they were sent."""
    await request.read()
    if "stream" not in request.query:
        return web.Response(body=ANSWER, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(PIECES):
        await asyncio.sleep(PIECE_S)
        await response.write(STAMP.pack(time.monotonic()))
    return response


def upstream(port: "multiprocessing.Queue[int]") -> None:
    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/messages", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def running_upstream() -> Iterator[str]:
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    process = multiprocessing.Process(target=upstream, args=(port,), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{port.get(timeout=60)}"
    process.terminate()


@asynccontextmanager
async def running_relay(to: str, directory: Path) -> AsyncIterator[str]:
    argv = ["--upstream", to, "--repack-cold", "--port", "0", "--data-dir", str(directory)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "regrow", "relay", "--log-level", "warning"),
        *argv,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readuntil(b"Relaying ")
    yield (await process.stdout.readline()).split()[0].decode()
    process.terminate()
    await process.wait()


async def request_ms(http: aiohttp.ClientSession, url: str, body: bytes) -> list[float]:
    began = time.monotonic()
    async with http.post(f"{url}/v1/messages", data=body) as response:
        await response.read()
    return [(time.monotonic() - began) * 1e3]


async def pieces_ms(http: aiohttp.ClientSession, url: str, body: bytes) -> list[float]:
    late = []
    async with http.post(f"{url}/v1/messages?stream", data=body) as response:
        for _ in range(PIECES):
            (sent,) = STAMP.unpack(await response.content.readexactly(STAMP.size))
            late.append((time.monotonic() - sent) * 1e3)
        await response.read()
    return late


async def row(what: str, straight: str, relay: str, body: bytes, rounds: int) -> dict[str, harness.Cell]:
    measure = pieces_ms if what.startswith("a piece") else request_ms
    times: dict[str, list[float]] = {straight: [], relay: []}
    async with aiohttp.ClientSession() as http:
        for number in range(rounds + 1):
            for url, taken in times.items():
                found = await measure(http, url, body)
                taken.extend(found if number else [])  # the first round opens the connections
    (median, p99), (over_median, over_p99) = map(percentiles, times.values())
    return {
        "ms": what,
        "straight": median,
        "p99": p99,
        "relay": over_median,
        "relay p99": over_p99,
        "added": over_median - median,
        "added p99": over_p99 - p99,
    }


def percentiles(taken: list[float]) -> tuple[float, float]:
    return statistics.median(taken), statistics.quantiles(taken, n=100, method="inclusive")[98]


def set_back(directory: Path) -> None:
    """Let every touch in the relay's file be an hour older."""
    path = directory / FILE
    state = json.loads(path.read_text())
    for record in state["conversations"].values():
        record["touched"] -= 3600
    path.write_text(json.dumps(state))


async def measured(straight: str, quick: bool) -> list[dict[str, harness.Cell]]:
    rounds = 100 if quick else 1000
    small, large = chat(0), chat(140)
    kilobytes = f"{len(large) // 1000} KB"
    with tempfile.TemporaryDirectory() as place:
        async with running_relay(straight, Path(place)) as relay:
            rows = [
                await row("a request of 20 KB", straight, relay, small, rounds),
                await row(f"a request of {kilobytes}", straight, relay, large, rounds),
                await row("a piece of a stream", straight, relay, small, max(1, rounds // PIECES)),
            ]
        set_back(Path(place))
        async with running_relay(straight, Path(place)) as relay:
            rows.append(await row(f"{kilobytes}, shortened", straight, relay, large, rounds))
            async with aiohttp.ClientSession() as http, http.get(f"{relay}/relay/status") as response:
                assert (await response.json())["decisions"].get("sticky"), "nothing was shortened"
    return rows


def main() -> None:
    opts = harness.options("relay", __doc__ or "", model="no model")
    with running_upstream() as straight:
        rows = asyncio.run(measured(straight, opts.quick))
    harness.report("relay", opts, "Latency that the relay adds, milliseconds", rows)


if __name__ == "__main__":
    main()
