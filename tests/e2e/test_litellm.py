"""LiteLLM against the real server, over its OpenAI and its Anthropic provider."""

import json
import os

import jsonschema
import pytest

from tests.e2e.server import Server
from tests.models.schemas import closed

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is to be fetched
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PARAMETERS = closed({"n": {"type": "integer", "minimum": 0, "maximum": 99}})
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
PROVIDERS = {"openai": "/v1", "anthropic": ""}
MESSAGES = [
    {"role": "system", "content": "A library that speaks to everybody speaks here. " * 8},
    {"role": "user", "content": "Well?"},
]


async def complete(server: Server, provider: str, **fields: object):
    return await litellm.acompletion(
        model=f"{provider}/{fields.pop('model', server.model)}",
        api_base=server.url + PROVIDERS[provider],
        api_key="none",
        num_retries=0,
        **{"messages": MESSAGES, "max_tokens": 24, "temperature": 0, **fields},
    )


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_stream_adds_up_to_the_whole_answer(hybrid: Server, provider: str) -> None:
    whole = await complete(hybrid, provider)
    stream = await complete(hybrid, provider, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 24)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_tool_is_called_and_its_result_is_read(hybrid: Server, provider: str) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400, "temperature": 1.0}
    (call,) = (await complete(hybrid, provider, **fields)).choices[0].message.tool_calls
    assert call.function.name == "look"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    asked = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
    answer = await complete(hybrid, provider, messages=[*MESSAGES, asked, result], tools=[TOOL])
    assert answer.usage.prompt_tokens > 0
    assert answer.choices[0].message.content


async def test_structured_output_is_what_its_schema_says(hybrid: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": PARAMETERS}}
    answer = await complete(hybrid, "openai", response_format=form, max_tokens=400, temperature=1.0)
    jsonschema.validate(json.loads(answer.choices[0].message.content), PARAMETERS)


async def test_logprobs_are_told(hybrid: Server) -> None:
    answer = await complete(hybrid, "openai", logprobs=True, top_logprobs=2, max_tokens=3)
    told = answer.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in told] == [2, 2, 2]


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_errors_are_told_by_their_kind(hybrid: Server, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        await complete(hybrid, provider, model="nobody")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await complete(hybrid, provider, temperature=-1)
