"""The relay as a plain proxy: what goes in comes out, both ways, whatever it is."""

import asyncio
import gzip
import json
import os
import threading
import zlib
from collections.abc import AsyncIterator

import pytest
from yarl import URL

from tests.api.relay.conftest import Start, World
from tests.api.relay.server import KEY, Received
from tests.policy.prompts import chat

AUTH = {"x-api-key": KEY, "Authorization": f"Bearer {KEY}"}
PROMPT = json.dumps(
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}, indent=3
)
BOTH = pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])


async def both(world: World, method: str, path: str, **request: object) -> tuple[Received, Received]:
    """Send the same request to the provider and through the relay; the answers must be the same bytes."""
    answers = []
    for client, place in ((world.direct, world.provider_url), (world.http, world.url)):
        target = URL(place + path, encoded=True)
        async with client.request(method, target, allow_redirects=False, **request) as response:
            headers = {k: v for k, v in response.headers.items() if k not in ("Date", "Transfer-Encoding")}
            answers.append((response.status, response.reason, headers, await response.read()))
    assert answers[0] == answers[1]
    direct, relayed = world.provider.received[-2:]
    assert (direct.method, direct.target, direct.body) == (relayed.method, relayed.target, relayed.body)
    return direct, relayed


def without_host(request: Received) -> list[tuple[str, str]]:
    return sorted((k, v) for k, v in request.headers if k.lower() != "host")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
async def test_any_method_path_and_query_passes_as_it_is(start: Start, method: str) -> None:
    world = await start(repack_cold=True)
    sent = {"X-Own": "a, b", "User-Agent": "mine", "anthropic-beta": "x-1", **AUTH}
    direct, relayed = await both(world, method, "/e%63ho?q=a%2Fb&k=%C3%BC;+", headers=sent)
    assert without_host(direct) == without_host(relayed)
    assert relayed.target == "/e%63ho?q=a%2Fb&k=%C3%BC;+"


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        PROMPT.encode(),
        b'{"messages": [], "a": 1.10, "a": 12345678901234567890123}',
        b'{ "messages" : "no list" }',
        b"not json \xff\x00",
        b"",
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude42 \\u00fc"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b"[" * 5000,
    ],
    ids=["plain", "odd numbers", "no list", "no json", "nothing", "escapes", "half a pair", "deep"],
)
async def test_a_prompt_that_is_not_to_be_changed_passes_byte_for_byte(
    start: Start, path: str, body: bytes
) -> None:
    world = await start(repack_cold=True, prune=True)
    direct, relayed = await both(world, "POST", path, data=body, headers={"Content-Type": "application/json"})
    assert without_host(direct) == without_host(relayed)


async def test_only_the_headers_of_the_one_connection_stay_behind(start: Start) -> None:
    world = await start()
    hop = {
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Proxy-Authorization": "p",
        "X-End": "2",
    }
    async with world.http.post("/echo", data=b"x", headers=hop) as response:
        assert response.headers["X-Kind"] == "echo"
    relayed = world.provider.received[-1]
    for name in ("X-Hop", "TE", "Proxy-Authorization"):
        assert relayed.header(name) is None
    assert relayed.header("X-End") == "2"
    assert relayed.header("Host") != world.url.removeprefix("http://")


async def test_nothing_is_added_to_what_a_client_sends(start: Start) -> None:
    world = await start()
    url = URL(world.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /echo HTTP/1.1\r\nHost: localhost\r\nx-Own: 1\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 203")
    writer.close()
    received = world.provider.received[-1].headers
    assert [name for name, _ in received if name != "Host"] == ["x-Own"]


async def test_no_cookie_of_one_client_reaches_another(start: Start) -> None:
    world = await start(by_name=True)  # cookies of mere addresses are not kept by any client
    for _ in range(2):
        async with world.http.get("/echo") as response:
            assert response.headers["Set-Cookie"] == "a=1"
        world.http.cookie_jar.clear()
    assert world.provider.received[-1].header("Cookie") is None


async def test_a_clients_accept_encoding_passes_but_is_narrowed_where_usage_is_read(start: Start) -> None:
    world = await start(repack_cold=True)
    for path, asked, got in (
        ("/echo", "zstd, br", "zstd, br"),
        ("/v1/messages", "br, gzip;q=0.8, zstd", "gzip;q=0.8"),
        ("/v1/messages", "zstd, br", "identity"),
    ):
        async with world.http.post(path, data=PROMPT, headers={"Accept-Encoding": asked, **AUTH}):
            pass
        assert world.provider.received[-1].header("Accept-Encoding") == got


@BOTH
async def test_a_compressed_answer_passes_compressed_and_its_usage_is_read(start: Start, path: str) -> None:
    world = await start(repack_cold=True)
    _, relayed = await both(
        world, "POST", path, data=PROMPT.encode(), headers={"Accept-Encoding": "gzip", **AUTH}
    )
    assert relayed.header("Accept-Encoding") == "gzip"
    status = await world.get("/relay/status")
    assert status["tokens"]["output"] == 5
    assert status["unmeasured"] == 0


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
async def test_a_compressed_prompt_passes_as_it_is(start: Start, coding: str) -> None:
    world = await start(repack_cold=True)
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "br": bytes}[coding](PROMPT.encode())
    headers = {"Content-Encoding": coding, "x-fault": "429", **AUTH}
    _, relayed = await both(world, "POST", "/v1/messages", data=packed, headers=headers)
    assert relayed.body == packed
    assert relayed.header("Content-Encoding") == coding


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_prompt_is_shortened_too(start: Start, coding: str) -> None:
    world = await start(repack_cold=True)
    body = json.dumps({"model": "m", "system": "s" * 9000, "messages": chat(20)}).encode()
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}[coding](body)
    for _ in range(2):
        headers = {"Content-Encoding": coding, "x-fault": "429", **AUTH}
        async with world.http.post("/v1/messages", data=packed, headers=headers):
            pass
        world.machine.true += 601
    assert world.provider.received[-2].body == packed
    assert world.provider.received[-1].header("Content-Encoding") is None
    assert len(json.loads(world.sent)["messages"]) == 41
    assert len(world.sent) < len(body)


@BOTH
async def test_ten_mebibytes_pass_both_ways(start: Start, path: str) -> None:
    world = await start(repack_cold=True)
    text = "x" * (10 << 20)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    await both(world, "POST", path, data=body, headers=AUTH)
    await both(world, "POST", "/echo", data=os.urandom(10 << 20))


async def test_a_body_without_a_length_streams_through(start: Start) -> None:
    world = await start()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with world.http.post("/echo", data=pieces()) as response:
        assert await response.read() == b"x" * 100_000
    assert world.provider.received[-1].header("Transfer-Encoding") == "chunked"


async def test_a_prompt_longer_than_what_is_looked_into_streams_through(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.api.relay.proxy.LIMIT_BYTES", 1000)
    world = await start(repack_cold=True)
    body = json.dumps({"model": "m", "messages": chat(3, ttl=None)}).encode()
    await both(world, "POST", "/v1/messages", data=body, headers=AUTH)
    assert (await world.get("/relay/status"))["decisions"] == {}


async def test_a_redirect_is_the_clients_to_follow(start: Start) -> None:
    world = await start()
    world.provider.redirect = "http://127.0.0.1:9/elsewhere"
    async with world.http.get("/echo", allow_redirects=False) as response:
        assert response.status == 307
        assert response.headers["Location"] == "http://127.0.0.1:9/elsewhere"


async def test_fifty_long_prompts_at_once_reach_the_provider_once_each(start: Start) -> None:
    world = await start(repack_cold=True)

    async def post(number: int) -> int:
        body = json.dumps({"model": "m", "n": number, "messages": chat(30, seed=number)})
        async with world.http.post("/v1/messages", data=body, headers=AUTH) as response:
            await response.read()
            return response.status

    assert await asyncio.gather(*map(post, range(50))) == [200] * 50
    numbers = sorted(json.loads(request.body)["n"] for request in world.provider.received)
    assert numbers == list(range(50))


async def test_a_request_that_the_provider_did_not_answer_is_not_sent_again(start: Start) -> None:
    world = await start(repack_cold=True)
    async with world.http.post("/echo", data=b"x"):  # opens a connection that is kept
        pass
    async with world.http.post(
        "/v1/messages", data=PROMPT, headers={"x-fault": "hang up", **AUTH}
    ) as response:
        assert response.status == 502
        told = await response.json()
    assert told["type"] == "error"
    assert len(world.provider.received) == 2


async def test_a_client_that_does_not_read_holds_the_provider_back(start: Start) -> None:
    world = await start()
    async with world.http.get("/flood") as response:
        await response.content.readany()
        flowed = -1
        while flowed != world.provider.flowed:
            flowed = world.provider.flowed
            for _ in range(20):
                async with world.http.post("/echo", data=b"x"):
                    pass
        assert flowed < 256 << 20
        response.close()
    await asyncio.wait_for(world.provider.left.wait(), 20)


async def test_a_client_that_leaves_while_its_prompt_is_looked_into_leaves_nothing_open(start: Start) -> None:
    world = await start(repack_cold=True)
    decider, looking, ended, go_on = world.relay.decider, asyncio.Event(), asyncio.Event(), threading.Event()
    loop, consider, finished = asyncio.get_running_loop(), decider.consider, decider.finished

    def slow(*prompt: object) -> object:
        loop.call_soon_threadsafe(looking.set)
        assert go_on.wait(20)
        return consider(*prompt)

    def counted(*answer: object) -> None:
        finished(*answer)
        loop.call_soon_threadsafe(ended.set)

    body = json.dumps({"model": "m", "system": "s" * 9000, "messages": chat(20)})
    decider.consider, decider.finished = slow, counted
    leaving = asyncio.create_task(world.http.post("/v1/messages", data=body, headers=AUTH))
    await looking.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    go_on.set()
    await asyncio.wait_for(ended.wait(), 20)
    decider.consider, decider.finished = consider, finished
    world.machine.true += 601
    async with world.http.post("/v1/messages", data=body, headers=AUTH):
        pass
    assert (await world.get("/relay/status"))["decisions"] == {"pass": 1, "cold": 1}


async def test_it_is_no_proxy_to_anywhere(start: Start) -> None:
    world = await start()
    url = URL(world.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET http://elsewhere.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert world.provider.received == []


async def test_browsers_on_other_pages_are_refused(start: Start) -> None:
    world = await start()
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        async with world.http.get("/relay/status", headers=headers) as response:
            assert response.status == 403
