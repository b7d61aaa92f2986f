"""What the relay tells of itself: status, metrics, originals, logs. Never a secret."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from regrow.api.logs import configure_logs
from regrow.policy.history import content_hash
from tests.api.relay.conftest import Start, World
from tests.api.relay.server import KEY
from tests.policy.prompts import chat

SECRET = "the launch code is 0000"
SYSTEM = "You are a coding agent. " * 2000


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**before)
    root.handlers[:], root.level = handlers, level
    logging.getLogger("regrow").setLevel(logging.NOTSET)


async def send(world: World, messages: list[dict], fault: str = "", **more: object) -> int:
    body = {"model": "claude-sonnet-4-5", "max_tokens": 9, "system": SYSTEM, "messages": messages} | more
    headers = {"x-api-key": KEY, "Authorization": f"Bearer {KEY}", "x-fault": fault}
    async with world.http.post(f"/v1/messages?key={KEY}", json=body, headers=headers) as response:
        await response.content.read()
        return response.status


async def cold_turn(world: World) -> None:
    await send(world, chat(20))
    world.machine.true += 601
    await send(world, chat(20))


async def test_the_status_tells_decisions_attribution_tokens_and_cost(start: Start) -> None:
    world = await start(repack_cold=True, data_dir=None)
    await cold_turn(world)
    world.machine.true += 30
    await send(world, chat(21))
    status = await world.get("/relay/status")
    first, cold, sticky = world.provider.bills
    assert status["decisions"] == {"pass": 1, "cold": 1, "sticky": 1}
    assert status["turns"] == {"cold start": 1, "ttl lapse": 1, "warm reuse": 1}
    assert status["requests"] == {"200": 3}
    assert status["tokens"] == {
        "fresh": first.fresh + cold.fresh + sticky.fresh,
        "read": cold.read + sticky.read,
        "written_5m": first.written_5m + cold.written_5m + sticky.written_5m,
        "written_1h": 0,
        "output": 15,
    }
    assert status["cost_usd"] == pytest.approx(
        (first.cost + cold.cost + sticky.cost) * 3 / 1e6 + 15 * 15 / 1e6
    )
    whole = first.tokens - cold.tokens  # what the provider would have billed in addition, twice
    assert status["removed_tokens"] == pytest.approx(2 * whole, rel=0.1)
    assert status["saved_usd"] == pytest.approx(whole * (3.75 + 0.3) / 1e6, rel=0.1)
    assert (status["conversations"], status["latched"], status["dry_run"]) == (1, 1, False)


async def test_the_metrics_say_the_same(start: Start) -> None:
    world = await start(repack_cold=True)
    await cold_turn(world)
    async with world.http.get("/metrics") as response:
        assert response.content_type == "text/plain"
        text = await response.text()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['regrow_relay_decisions_total{decision="cold"}'] == "1.0"
    assert lines['regrow_relay_turns_total{cause="ttl lapse"}'] == "1.0"
    assert float(lines["regrow_relay_saved_usd_total"]) > 0
    assert lines["regrow_relay_conversations"] == "1.0"


async def test_what_has_no_usage_is_counted_apart_and_an_error_is_not(start: Start) -> None:
    world = await start(repack_cold=True)
    await send(world, chat(1), "429")
    assert (await world.get("/relay/status"))["unmeasured"] == 0
    await send(world, chat(1), "silent")
    status = await world.get("/relay/status")
    assert (status["unmeasured"], status["tokens"]) == (1, {})
    await send(world, chat(1), model="nobody-knows")
    status = await world.get("/relay/status")
    assert (status["unpriced"], status["cost_usd"], status["tokens"]["output"]) == (1, 0, 5)


async def test_a_changed_prefix_is_counted_by_its_part(start: Start) -> None:
    world = await start()
    await send(world, chat(3))
    await send(world, chat(3), tools=[{"name": "new"}])
    status = await world.get("/relay/status")
    assert status["turns"] == {"cold start": 1, "prefix change": 1}
    assert status["prefix_changes"] == {"tools": 1}


async def test_an_original_is_given_back_by_the_hash_that_stands_in_the_prompt(start: Start) -> None:
    world = await start(repack_cold=True)
    await cold_turn(world)
    text = chat(20)[2]["content"][0]["content"]
    assert content_hash(text) in world.sent.decode()
    async with world.http.get(f"/relay/original/{content_hash(text)}") as response:
        assert (response.status, response.content_type) == (200, "text/plain")
        assert await response.text() == text
    async with world.http.get(f"/relay/original/{'0' * 24}") as response:
        assert response.status == 404


async def test_a_dry_run_says_so_and_sends_everything(start: Start) -> None:
    world = await start(repack_cold=True, dry_run=True)
    await cold_turn(world)
    status = await world.get("/relay/status")
    assert status["dry_run"] is True
    assert status["decisions"]["cold"] == 1
    assert status["saved_usd"] > 0
    assert [message["role"] for message in json.loads(world.sent)["messages"]]
    assert json.loads(world.sent)["messages"] == chat(20)


async def test_the_end_of_a_response_is_a_touch(start: Start) -> None:
    world = await start(repack_cold=True)
    await send(world, chat(20))
    world.machine.true += 500
    world.provider.gate.set()
    await send(world, chat(20), "late")
    world.machine.true += 599
    await send(world, chat(20))
    assert (await world.get("/relay/status"))["decisions"] == {"pass": 3}


async def test_a_client_that_leaves_at_the_last_byte_is_no_error(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", True)
    world = await start(repack_cold=True)
    for _ in range(5):
        body = {"model": "m", "stream": True, "messages": chat(1)}
        async with world.http.post("/v1/messages", json=body, headers={"x-api-key": KEY}) as response:
            await response.content.readuntil(b"message_stop")
            response.close()
    assert (await world.get("/relay/status"))["tokens"]["output"] == 25
    assert "rror" not in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
async def test_no_log_holds_a_key_or_a_text(
    start: Start, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    configure_logs("debug", as_json)
    world = await start(repack_cold=True)
    said = [{"role": "user", "content": SECRET}, *chat(20)[1:]]
    for fault in ("", "429", "hang up", ""):
        await send(world, said, fault)
        world.machine.true += 601
    async with world.http.post(
        f"/v1/messages?key={KEY}", data=SECRET.encode(), headers={"x-api-key": KEY}
    ) as response:
        await response.read()
    err = capsys.readouterr().err
    assert err.count("turn") >= 4
    assert "unreadable body" in err
    for text in (KEY, SECRET, "coding agent", "Authorization", "api-key"):
        assert text not in err
