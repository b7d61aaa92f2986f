"""What an operator uses, against the real server: keys, metrics, the bench, and a queue of none."""

import asyncio
import subprocess
from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Client, Server, regrow, serving
from tests.e2e.streams import streaming
from tests.e2e.talk import ask

HELLO = [{"role": "user", "content": "Metrics, please."}]
KEY = "a-key-of-the-team"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    """A server with a key and one slot, where nobody may wait."""
    options = ("--parallel", "1", "--threads", "1", "--queue", "0", "--api-key", KEY, "--host", "0.0.0.0")
    with serving("random:qwen3_5", *options) as server:
        yield server


async def metrics(client: Client) -> dict[str, float]:
    """The sum over all labels of each sample."""
    told: dict[str, float] = {}
    async with client.http.get("/metrics") as response:
        assert response.status == 200
        for family in text_string_to_metric_families(await response.text()):
            for sample in family.samples:
                told[sample.name] = told.get(sample.name, 0.0) + sample.value
    return told


async def test_what_the_metrics_count_is_what_the_answers_say(hybrid: Server) -> None:
    async with hybrid.client() as client:
        await client.until(lambda status: status["engine"]["running"] == 0)
        before = await metrics(client)
        turns = [await ask(client, hybrid.model, HELLO, max_tokens=9) for _ in range(3)]
        after = await metrics(client)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["vllm:request_success_total"] == grown["vllm:time_to_first_token_seconds_count"] == 3
    assert grown["vllm:prompt_tokens_total"] == sum(turn.prompt_tokens for turn in turns)
    assert grown["vllm:prefix_cache_hits_total"] == sum(turn.regrow["reused"] for turn in turns) > 0
    assert grown["vllm:generation_tokens_total"] == 27
    assert grown["vllm:inter_token_latency_seconds_count"] == 24
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert grown["regrow_device_calls_total"] > 0
    assert after["regrow_cache_budget_bytes"] > 0


async def test_sixty_clients_that_come_at_once_are_all_answered(hybrid: Server) -> None:
    async with hybrid.client() as client:
        said = [[{"role": "user", "content": f"Client {number} speaks."}] for number in range(60)]
        turns = await asyncio.gather(*(ask(client, hybrid.model, one, max_tokens=2) for one in said))
    assert all(turn.prompt_tokens > 0 for turn in turns)


async def test_a_client_with_the_key_is_served_and_one_without_is_not(keyed: Server) -> None:
    url = keyed.url.replace("0.0.0.0", "127.0.0.1")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        friend = stranger.with_options(api_key=KEY)
        answer = await friend.chat.completions.create(model=keyed.model, messages=HELLO, max_tokens=2)
        assert answer.usage.completion_tokens == 2


async def test_whoever_finds_no_slot_and_no_queue_is_told_when_to_come_again(keyed: Server) -> None:
    url = keyed.url.replace("0.0.0.0", "127.0.0.1")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as official:
        client = Client(official, None)
        async with streaming(client, keyed.model, HELLO, max_tokens=4000) as stream:
            await stream.tokens(1)
            with pytest.raises(openai.RateLimitError) as refused:
                await official.chat.completions.create(model=keyed.model, messages=HELLO, max_tokens=2)
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            await stream.chunks.close()


async def test_the_bench_measures_a_server_and_sees_what_it_reuses(hybrid: Server) -> None:
    load = ("--clients", "2", "--turns", "2", "--tokens", "4")
    command = regrow("bench", "--url", hybrid.url, *load)
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    _, second = [line.split() for line in done.stdout.splitlines() if line.split()[0] in ("1", "2")][-2:]
    prompt, cached, failed = int(second[1]), int(second[2]), int(second[-1])
    assert cached > prompt / 2
    assert failed == 0
