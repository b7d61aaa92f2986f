"""/v1/stream above a fake device, in virtual time: order, clients that do not read, silence, and the end."""

import asyncio
from typing import Any

import pytest

from regrow.api.socket import SLOW_S
from tests.actors.world import House
from tests.api.test_virtual_time import MINUTE, SLOW, in_world, truth
from tests.world.engine import CHUNK
from tests.world.fake_runner import Costs
from tests.world.wire import Site
from tests.world.wire_socket import Line, connect

QUICK = Costs(read=2**-6, token=0.0, step=2**-9)


def ask(line: Line, name: str, text: str, **fields: Any) -> None:
    messages = [{"role": "user", "content": text}]
    body = {"model": "world", "messages": messages, "max_tokens": 6, "temperature": 0}
    line.say(type="create", id=name, request={**body, **fields})


def in_order(line: Line, name: str) -> bool:
    return [message["seq"] for message in line.of(name)] == list(range(len(line.of(name))))


def test_fifty_requests_on_one_connection_are_answered_in_order_each_with_its_own_answer() -> None:
    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server)
        texts = {f"r{number}": f"client {number} " + "and more " * (number % 7) for number in range(50)}
        for name, text in texts.items():
            ask(line, name, text)
        for number in range(0, 50, 10):
            line.say(type="cancel", id=f"r{number}")
        for name, text in texts.items():
            done = await line.until("done", name)
            assert in_order(line, name)
            if done["finish_reason"] == "cancelled":
                assert int(name[1:]) % 10 == 0
            else:
                assert line.text(name) == truth(house, text)
        line.leave()

    in_world(scenario, seeds=range(2), slots=3)


def test_progress_is_told_as_it_happens_and_the_other_requests_of_a_connection_do_not_wait() -> None:
    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server)
        ask(line, "long", "x" * 5 * CHUNK)
        await line.until("progress", "long")
        ask(line, "short", "hello")
        await line.until("done", "short")
        assert not any(message["type"] == "done" for message in line.of("long"))
        await line.until("done", "long")
        places = [message["position"] for message in line.of("long") if message["type"] == "progress"]
        assert places == sorted(set(places))
        times = [at for at, message in line.heard if message["type"] == "progress"]
        assert len(set(times)) == len(times) >= 5
        line.leave()

    in_world(scenario, costs=Costs(read=16.0, token=0.0), seeds=range(2))


def test_a_client_that_stops_reading_is_cut_off_alone() -> None:
    async def scenario(house: House, server: Site) -> None:
        slow, other = connect(server.server), connect(server.server)
        for number in range(2):
            ask(slow, f"s{number}", f"say {number}", max_tokens=400, logprobs=True, top_logprobs=20)
        await slow.until("delta", "s0")
        slow.stop_reading()
        for number in range(2):
            ask(other, f"o{number}", f"what is {number}")
            await other.until("done", f"o{number}")
            assert other.text(f"o{number}") == truth(house, f"what is {number}")
        await asyncio.sleep(SLOW_S + 6)
        assert house.requests == {}  # though neither of them was at its end
        assert not any(message["type"] == "done" for _, message in slow.heard)
        slow.read_again()
        await slow.ended.wait()
        ends = [message for _, message in slow.heard if message["type"] in ("error", "done")]
        assert [message["error"]["code"] for message in ends] == ["slow_consumer"] * 2
        assert slow.code == 1008
        other.leave()

    in_world(scenario, slots=3, costs=Costs(read=2**-6, token=0.0, step=2**-4), seeds=range(2))


def test_who_reads_again_in_time_misses_nothing() -> None:
    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server)
        ask(line, "a", "say much", max_tokens=400, logprobs=True, top_logprobs=20)
        await line.until("delta", "a")
        line.stop_reading()
        await asyncio.sleep(SLOW_S - 1)
        line.read_again()
        done = await line.until("done", "a")
        assert done["usage"]["completion_tokens"] == 400
        assert line.text("a") == truth(house, "say much", 400)
        assert in_order(line, "a")
        line.leave()

    in_world(scenario, costs=QUICK, seeds=range(2))


def test_a_connection_with_nothing_to_do_is_closed_after_a_time_and_one_that_waits_is_not() -> None:
    async def scenario(house: House, server: Site) -> None:
        idle, busy = connect(server.server), connect(server.server)
        ask(busy, "a", "x" * 3 * CHUNK)
        await asyncio.sleep(100)
        assert idle.code is None
        idle.say(type="ping")
        await asyncio.sleep(899)
        assert idle.code is None
        await asyncio.sleep(2)
        assert idle.code == 1000
        await busy.until("done", "a")
        ended = house.world.time()
        assert ended > 1000
        await busy.ended.wait()
        assert busy.code == 1000
        assert house.world.time() - ended == pytest.approx(900, abs=2)

    in_world(scenario, costs=Costs(read=6 * MINUTE, token=0.0, step=2**-5), seeds=range(2))


def test_at_the_end_of_the_server_what_runs_may_finish_and_then_the_connection_is_closed() -> None:
    lines: list[Line] = []

    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server)
        lines.append(line)
        ask(line, "a", "x" * 2 * CHUNK)
        await line.until("queued", "a")
        draining = house.world.create_task(house.engine.drain())
        await asyncio.sleep(1)
        ask(line, "b", "too late")
        assert (await line.until("error", "b"))["error"]["code"] == "draining"
        await draining
        assert (await line.until("done", "a"))["finish_reason"] == "length"

    in_world(scenario, costs=Costs(read=2.0), seeds=range(2))
    assert [line.code for line in lines] == [1001, 1001]


def test_a_client_that_leaves_ends_its_requests_and_what_was_read_is_kept() -> None:
    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server)
        ask(line, "a", "x" * 5 * CHUNK)
        await line.until("progress", "a")
        line.leave()
        await asyncio.sleep(MINUTE + 1)
        assert house.requests == {}
        again = connect(server.server)
        ask(again, "a", "x" * 5 * CHUNK)
        done = await again.until("done", "a")
        assert done["regrow"]["reused"] > 0
        again.leave()

    in_world(scenario, costs=SLOW, hybrid=False, seeds=range(2))


def test_a_peer_that_answers_no_ping_is_gone() -> None:
    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server)
        ask(line, "a", "x" * 9 * CHUNK)
        await line.until("progress", "a")
        line.stop_reading()
        await asyncio.sleep(2 * MINUTE)
        assert house.requests == {}
        line.leave()

    in_world(scenario, costs=SLOW, seeds=range(2))


def test_a_chain_over_the_responses_socket_reads_only_its_news_and_its_events_are_in_order() -> None:
    async def scenario(house: House, server: Site) -> None:
        line = connect(server.server, "/v1/responses")

        async def made(text: str, lane: str, previous: str | None = None) -> dict[str, Any]:
            body = {"input": text, "max_output_tokens": 6, "temperature": 0, "stream_id": lane}
            line.say(type="response.create", model="world", previous_response_id=previous, **body)
            while True:
                mine = [event for _, event in line.heard if event.get("stream_id") == lane]
                ends = [e for e in mine if e["type"] == "response.incomplete"]
                if ends and mine[-1] is ends[-1]:
                    numbers = [event["sequence_number"] for event in mine]
                    starts = [i for i, number in enumerate(numbers) if number == 0]
                    assert numbers[starts[-1] :] == list(range(len(numbers) - starts[-1]))
                    response: dict[str, Any] = ends[-1]["response"]
                    return response
                line.news.clear()
                await line.news.wait()

        first = await made("Tell me of something long, in many words", "a")
        second = await made("And what then?", "b", first["id"])
        third = await made("And then?", "c", second["id"])
        fork = await made("No, something else", "d", second["id"])
        for before, after in ((first, second), (second, third), (second, fork)):
            new = after["usage"]["input_tokens"] - before["usage"]["input_tokens"]
            assert after["regrow"]["read"] <= new + 16
            assert after["regrow"]["reused"] > 0
        line.leave()

    in_world(scenario, slots=2, seeds=range(2))
