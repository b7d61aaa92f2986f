"""Bad input is a clear 4xx, told to the official client as its own errors, and the server serves on."""

from collections.abc import Mapping
from typing import Any

import openai
import pytest

from tests.e2e.server import Client, Server
from tests.e2e.talk import ask

HELLO = [{"role": "user", "content": "Hello"}]


async def served(client: Client, model: str) -> bool:
    return (await ask(client, model, HELLO, max_tokens=1)).prompt_tokens > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"regrow": {"cache": "maybe"}}, "regrow.cache"),
    ],
    ids=str,
)
async def test_a_bad_field_is_named(hybrid: Server, fields: Mapping[str, Any], param: str) -> None:
    async with hybrid.client() as client:
        body = {"model": hybrid.model, "messages": HELLO, **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.openai.post("/chat/completions", body=body, cast_to=object)
        assert refused.value.param == param
        assert param in refused.value.message
        assert await served(client, hybrid.model)


async def test_an_unknown_model_is_not_found_and_told_what_there_is(hybrid: Server) -> None:
    async with hybrid.client() as client:
        with pytest.raises(openai.NotFoundError, match=hybrid.model) as refused:
            await ask(client, "gpt-9", HELLO)
        assert refused.value.code == "model_not_found"
        assert await served(client, hybrid.model)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"], ids=repr)
async def test_a_body_that_is_no_json_object_is_a_400(hybrid: Server, body: bytes) -> None:
    async with hybrid.client() as client:
        headers = {"Content-Type": "application/json"}
        async with client.http.post("/v1/chat/completions", data=body, headers=headers) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert await served(client, hybrid.model)


@pytest.mark.parametrize(
    ("text", "max_tokens"),
    [("Hello", 32_768), ("x" * 40_000, 1), ("word " * (2 * 2**20 // 5), 1)],
    ids=["answer", "prompt", "2 MiB"],
)
async def test_what_does_not_fit_the_context_is_a_400_with_both_numbers(
    hybrid: Server, text: str, max_tokens: int
) -> None:
    async with hybrid.client() as client:
        with pytest.raises(openai.BadRequestError, match=r"32768 tokens") as refused:
            await ask(client, hybrid.model, [{"role": "user", "content": text}], max_tokens=max_tokens)
        assert refused.value.code == "context_length_exceeded"
        assert f"max_tokens is {max_tokens}" in refused.value.message
        assert await served(client, hybrid.model)
