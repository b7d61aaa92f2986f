"""Live connections to the real server, through the official client: what a turn reads, and what a lost one
costs."""

import asyncio
import itertools
import signal
from typing import Any

import aiohttp

from tests.e2e.server import Client, Server, serving

CALLS = 20
OPENING = 12  # tokens that open a message, which are not among those that the prompt before had
TOOL: Any = {
    "type": "function",
    "name": "look",
    "description": "Looks at something.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"what": {"type": "string", "enum": ["sky", "sea"]}},
        "required": ["what"],
        "additionalProperties": False,
    },
}
FORCED: Any = {"type": "function", "name": "look"}
IN_TIME = 120.0


async def final(connection: Any) -> Any:
    async with asyncio.timeout(IN_TIME):
        while True:
            event = await connection.recv()
            assert event.type not in ("error", "response.failed"), event
            if event.type in ("response.completed", "response.incomplete"):
                return event.response


def asked(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": FORCED, "temperature": 0}
    return {"model": server.model, "input": text, "max_output_tokens": 120, **tools, **fields}


def result(response: Any, text: str) -> list[Any]:
    call = next(item for item in response.output if item.type == "function_call")
    return [{"type": "function_call_output", "call_id": call.call_id, "output": text}]


def news(before: Any, after: Any) -> int:
    """The tokens of a prompt beyond those of the one before."""
    return after.usage.input_tokens - before.usage.input_tokens


def read(response: Any) -> int:
    facts = response.model_extra["regrow"]
    assert facts["reused"] == response.usage.input_tokens_details.cached_tokens
    return facts["read"]


async def loop_over_http(client: Client, server: Server, text: str) -> list[Any]:
    responses = [await client.openai.responses.create(**asked(server, text))]
    for number in range(CALLS // 4):
        more = asked(server, "", input=result(responses[-1], f"number {number}"))
        responses.append(await client.openai.responses.create(**more, previous_response_id=responses[-1].id))
    return responses


async def test_a_tool_loop_reads_only_its_news_and_forks_and_a_lost_connection_cost_no_more(
    hybrid: Server,
) -> None:
    async with hybrid.client() as client:
        responses = client.openai.responses
        async with responses.connect() as connection:
            await connection.response.create(**asked(hybrid, "Look around, over a socket. " * 20))
            turns = [await final(connection)]
            for number in range(CALLS):
                more = asked(hybrid, "", input=result(turns[-1], f"number {number}"))
                await connection.response.create(**more, previous_response_id=turns[-1].id)
                turns.append(await final(connection))
            for before, after in itertools.pairwise(turns):
                assert after.output[-1].type == "function_call"
                assert read(after) <= news(before, after) + OPENING
            for turn, names in ((turns[-2], ("up", "down")), (turns[10], ("left", "right"))):
                for name in names:
                    more = asked(hybrid, f"Go {name} instead.", previous_response_id=turn.id)
                    await connection.response.create(**more)
                    fork = await final(connection)
                    if name != "left":  # of turns long ago a place to rejoin is kept once somebody did
                        assert read(fork) <= news(turn, fork) + OPENING
            await connection.response.create(**asked(hybrid, "And this is lost. " * 3))
        async with responses.connect() as connection:
            more = asked(hybrid, "", input=result(turns[-1], "found again"))
            await connection.response.create(**more, previous_response_id=turns[-1].id)
            again = await final(connection)
            assert read(again) <= news(turns[-1], again) + OPENING
        over_http = await loop_over_http(client, hybrid, "Look around, over HTTP too. " * 20)
        for before, after in itertools.pairwise(over_http):
            assert read(after) <= news(before, after) + OPENING
        kinds = [item["type"] for item in (await responses.retrieve(again.id)).to_dict()["output"]]  # type: ignore[union-attr]
        assert kinds == ["function_call"]


async def test_requests_of_one_connection_decode_beside_each_other(hybrid: Server) -> None:
    async with hybrid.client() as client, client.http.ws_connect("/v1/stream") as ws:
        for number in range(8):
            messages = [{"role": "user", "content": f"Say {number} and more."}]
            body = {"model": hybrid.model, "messages": messages, "max_tokens": 24, "ignore_eos": True}
            await ws.send_json({"type": "create", "id": str(number), "request": body})
        heard: list[Any] = []
        while sum(message["type"] == "done" for message in heard) < 8:
            message = await ws.receive(timeout=IN_TIME)
            assert message.type is aiohttp.WSMsgType.TEXT
            heard.append(message.json())
    assert not [message for message in heard if message["type"] == "error"]
    for number in range(8):
        mine = [message for message in heard if message["id"] == str(number)]
        assert [message["seq"] for message in mine] == list(range(len(mine)))
        assert mine[-1]["usage"]["completion_tokens"] == 24
    order = [message["id"] for message in heard if message["type"] == "delta"]
    assert any(a != b for a, b in itertools.pairwise(order))


async def test_a_client_that_reads_nothing_holds_nobody_up(hybrid: Server) -> None:
    async with hybrid.client() as slow, hybrid.client() as client, slow.http.ws_connect("/v1/stream") as ws:
        messages = [{"role": "user", "content": "Say much."}]
        body = {"model": hybrid.model, "messages": messages, "max_tokens": 400, "ignore_eos": True}
        for number in range(2):
            request = {**body, "logprobs": True, "top_logprobs": 20}
            await ws.send_json({"type": "create", "id": str(number), "request": request})
        answer = await client.openai.chat.completions.create(
            model=hybrid.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert answer.usage.completion_tokens  # type: ignore[union-attr]


async def everything(ws: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    """Hear a connection to its end, at once: who answers a close too late is cut off."""
    return [message.json() async for message in ws]


async def test_at_a_stop_signal_what_runs_ends_and_every_connection_is_told() -> None:
    with serving("random:llama", "--threads", "1") as server:
        async with (
            server.client() as client,
            client.http.ws_connect("/v1/stream") as busy,
            client.http.ws_connect("/v1/stream") as idle,
            client.http.ws_connect("/v1/responses") as other,
        ):
            messages = [{"role": "user", "content": "hello"}]
            body = {"model": server.model, "messages": messages, "max_tokens": 100, "ignore_eos": True}
            await busy.send_json({"type": "create", "id": "a", "request": body})
            while (await busy.receive_json(timeout=IN_TIME))["type"] != "delta":
                pass
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(IN_TIME):
                said, *others = await asyncio.gather(*(everything(ws) for ws in (busy, idle, other)))
            assert (said[-1]["type"], said[-1]["usage"]["completion_tokens"]) == ("done", 100)
            assert others == [[], []]
            assert [ws.close_code for ws in (busy, idle, other)] == [1001] * 3
        assert server.process.wait(IN_TIME) == 0
