"""`regrow serve --repack-cold`: what is lost is read shortened, and stays so after a restart."""

import hashlib
from pathlib import Path
from typing import Any

from tests.e2e.server import Client, serving

MODEL = "random:qwen3_5"
LONG = "\n".join(f"line {i} of a long output" for i in range(400))
SYSTEM = {"role": "system", "content": "You are an agent. " * 20}


def agent(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Look at the long output. " * 40}]
    for number in range(turns):
        call = {"id": f"{number}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        result = LONG if number == 2 else f"result {number}"
        messages += [
            {"role": "assistant", "content": f"step {number}; " * 60, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"{number}", "content": result},
        ]
    return messages


async def ask(client: Client, messages: list[dict[str, Any]]) -> Any:
    """Returns the usage and the facts of one answer."""
    answer = await client.openai.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=2,
        temperature=0,  # type: ignore[arg-type]
    )
    return answer.usage, answer.model_extra["regrow"]


async def test_a_lost_conversation_is_read_shortened_once_and_then_goes_on(tmp_path: Path) -> None:
    options = ("--parallel", "1", "--cache-mib", "0", "--threads", "1", "--ctx", "32768", "--exact", "full")
    cold = ("--repack-cold", "--conversation-ttl", "0", "--data-dir", str(tmp_path))
    with serving(MODEL, *options, *cold) as server:
        async with server.client() as client:
            whole, first = await ask(client, agent(12))
            assert "repacked" not in first
            await ask(client, [{"role": "user", "content": "Something else. " * 40}])  # takes the only slot
            short, facts = await ask(client, agent(12))
            assert facts["repacked"]["decision"] == "cold"
            assert facts["repacked"]["messages"] == 1
            assert 0 < whole.prompt_tokens - short.prompt_tokens == facts["repacked"]["characters"]  # bytes
            longer, facts = await ask(client, agent(13))
            assert facts["repacked"]["decision"] == "sticky"
            name = hashlib.sha256(LONG.encode()).hexdigest()[:24]
            async with client.http.get(f"/v1/cache/originals/{name}") as response:
                assert await response.text() == LONG
            assert (await client.status())["repack"]["latched"] == 1
    with serving(MODEL, *options, *cold) as server:
        async with server.client() as client:
            again, facts = await ask(client, agent(13))
            assert facts["repacked"]["decision"] == "cold"  # again, and shortened as before
            assert again.prompt_tokens == longer.prompt_tokens
