"""The requests of a coding agent, as it sends them: long tool lists, many turns, large tool results."""

import json

import anthropic
import openai
import pytest

from tests.e2e.server import Server

PROPERTIES = {
    "file_path": {"type": "string", "description": "The absolute path of the file"},
    "offset": {"type": "number", "description": "The line to start from"},
    "limit": {"type": "number", "description": "How many lines"},
    "mode": {"type": "string", "enum": ["read", "write"]},
    "edits": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"old_string": {"type": "string"}, "new_string": {"type": "string"}},
            "required": ["old_string", "new_string"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["file_path"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
NAMES = [f"Tool{number}" for number in range(18)]
SYSTEM = "You are an agent that edits code and says little. " * 6
TURNS = 30


def result(turn: int) -> str:
    return f"{turn:4} | def f{turn}(x):\n     |     return x\n"


async def test_thirty_turns_with_tools_each_read_only_what_is_new(hybrid: Server) -> None:
    tools = [{"name": name, "description": "Edits.", "input_schema": SCHEMA} for name in NAMES]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Fix the parser."}]}]
    read = []
    async with anthropic.AsyncAnthropic(base_url=hybrid.url, api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            async with client.messages.stream(
                model=hybrid.model,
                max_tokens=2,
                system=system,
                tools=tools,
                messages=messages,
                metadata={"user_id": "user_1"},
                extra_body={"temperature": 0},
            ) as stream:
                usage = (await stream.get_final_message()).usage
            read.append(usage.input_tokens)
            call = {
                "type": "tool_use",
                "id": f"toolu_{turn}",
                "name": NAMES[0],
                "input": {"file_path": f"/a/{turn}"},
            }
            told = {"type": "tool_result", "tool_use_id": call["id"], "content": result(turn)}
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
                {"role": "user", "content": [told]},
            ]
    assert read[0] > 10_000
    assert max(read[1:]) < 300


async def test_a_tool_result_of_20_kilobytes_is_read_and_answered(hybrid: Server) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES
    ]
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": NAMES[0], "arguments": json.dumps({"path": "a"})},
    }
    messages = [
        {"role": "system", "content": "Large results. " + SYSTEM},
        {"role": "user", "content": "Read the file."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": ("".join(map(result, range(2000))))[:20_000]},
    ]
    async with hybrid.client() as client:
        answer = await client.openai.chat.completions.create(
            model=hybrid.model,
            messages=messages,
            tools=tools,
            max_tokens=4,
            temperature=0,
            parallel_tool_calls=True,
        )
    assert answer.usage.prompt_tokens > 20_000
    assert answer.usage.completion_tokens == 4


async def test_a_picture_is_refused_in_words(hybrid: Server) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "See"}, picture]}]
    async with hybrid.client() as client:
        with pytest.raises(openai.BadRequestError, match="no vision"):
            await client.openai.chat.completions.create(model=hybrid.model, messages=messages)
