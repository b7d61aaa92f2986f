"""A server that was killed goes on with its conversations; one directory belongs to one server."""

import subprocess
from pathlib import Path

from tests.e2e.server import Client, Facts, regrow, serving

MODEL = "random:qwen3_5"
OPTIONS = ("--parallel", "2", "--ctx", "2048", "--cache-mib", "64", "--cache-disk-gib", "1")
OPENING = [
    {"role": "system", "content": "You answer in one word. " * 20},
    {"role": "user", "content": "What is this, and what is it for? " * 10},
]
NEXT = [*OPENING, {"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "And that?"}]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(regrow(*words), capture_output=True, text=True, check=False)


async def ask(client: Client, messages: list[dict[str, str]]) -> tuple[str, int, Facts]:
    answer = await client.openai.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=6,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.model_extra is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return answer.choices[0].message.content or "", cached, answer.model_extra["regrow"]


async def test_after_kill_9_a_conversation_goes_on_from_disk_with_the_same_answer(tmp_path: Path) -> None:
    kept = ("--cache-dir", str(tmp_path / "kept"))
    with serving(MODEL, *OPTIONS, *kept) as server:
        async with server.client() as client:
            await ask(client, OPENING)
            status = await client.until(lambda status: status["disk"]["counters"]["written"] >= 2)
            truth, cached, _ = await ask(client, NEXT)
            refused = run("cache", "ls", *kept)
        server.process.kill()
        server.process.wait()
    assert status["disk"]["counters"]["state"] == "on"
    assert refused.returncode == 2
    assert "in use by another regrow process" in refused.stderr
    with serving(MODEL, *OPTIONS, *kept) as server:
        async with server.client() as client:
            answer, again, told = await ask(client, NEXT)
    assert answer == truth
    assert told["source"] == "disk"
    assert again >= 0.95 * cached > 0
    checked = run("cache", "verify", *kept)
    assert (checked.returncode, checked.stdout.strip()) == (0, "every record is as it was written")
