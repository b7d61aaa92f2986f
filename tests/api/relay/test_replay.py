"""What the rules save on recorded traces, that they never cost, and what leaving one out costs.

The provider's entries live for one to two times their TTL, drawn for each use; where rules are left out,
always for twice, which is what the margin is for. Of the traces with a pause long enough for a cold turn a
part is replayed; with `REGROW_ALL_TRACES=1` every trace there is.
"""

import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import structlog

from tests.api.relay.conftest import Start
from tests.api.relay.replay import VARIANTS, Replayed, replay, replay_trace, small_chats
from tests.api.relay.server import KEY
from tests.api.relay.traces import load, longest_pause, needs_traces, requests_of

ALL = bool(os.environ.get("REGROW_ALL_TRACES"))
ABLATED = [name for name in VARIANTS if name not in ("the rules", "no floor")]


def quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=quiet) as workers:
        yield workers


def chosen(pause: float, step: int) -> list[dict]:
    return load() if ALL else [trace for trace in load() if longest_pause(trace) > pause][::step]


def told(name: str, replayed: list[Replayed]) -> float:
    """Print what a variant costs; returns the part that it saves."""
    without, relayed = sum(r.without for r in replayed), sum(r.relayed for r in replayed)
    saved = 1 - relayed / without
    print(
        f"{name}: {len(replayed)} traces, {sum(r.requests for r in replayed)} requests, "
        f"{sum(r.cold for r in replayed)} cold turns; {without / 1e6:.1f} million without, "
        f"{relayed / 1e6:.1f} with: {saved:.1%} saved; {sum(r.harmed for r in replayed)} traces cost more"
    )
    return saved


@needs_traces
@pytest.mark.parametrize("ttl, pause, step, least", [("5m", 600.0, 12, 0.1), ("1h", 7200.0, 4, 0.001)])
def test_no_trace_costs_more_with_the_relay_and_together_they_cost_less(
    pool: ProcessPoolExecutor, ttl: str, pause: float, step: int, least: float
) -> None:
    replayed = list(pool.map(partial(replay_trace, ttl=ttl), chosen(pause, step)))
    assert told(f"the rules, {ttl}", replayed) > least
    assert [r.trace for r in replayed if r.harmed] == []


@needs_traces
def test_leaving_out_a_rule_costs_more(pool: ProcessPoolExecutor) -> None:
    traces = chosen(600.0, 24)
    saved, harmed = {}, {}
    for variant in ("the rules", *ABLATED):
        replayed = list(pool.map(partial(replay_trace, variant=variant, drawn=False), traces))
        saved[variant] = told(variant, replayed)
        harmed[variant] = sum(one.harmed for one in replayed)
    assert max(saved, key=saved.__getitem__) == "the rules"
    assert saved["no latch"] < 0
    assert saved["moving boundary"] < 0.5 * saved["the rules"]
    assert saved["latch over all messages"] < 0.9 * saved["the rules"]
    assert harmed.pop("the rules") == 0
    assert min(harmed.values()) > 0


def test_without_the_floor_a_prefix_becomes_too_small_to_be_cached_and_costs_more() -> None:
    quiet()
    by_the_rules = replay("small", small_chats())
    without_floor = replay("small", small_chats(), "no floor")
    assert not by_the_rules.harmed
    assert without_floor.harmed
    assert without_floor.changed > by_the_rules.changed


@needs_traces
async def test_a_trace_over_real_sockets_costs_what_it_costs_in_process(start: Start) -> None:
    quiet()
    traces = [trace for trace in load() if len(trace["requests"]) < 60]
    trace = next(t for t in traces if (r := replay_trace(t)).cold and r.changed > 5)
    expected = replay_trace(trace)
    world = await start(repack_cold=True)
    world.provider.cache.lingering = 1.0
    began = world.machine.true
    world.provider.now = lambda: world.machine.true - began
    for request in requests_of(trace):
        world.machine.true = began + request.at
        async with world.http.post("/v1/messages", data=request.body, headers={"x-api-key": KEY}) as response:
            assert response.status == 200
            await response.read()
    assert sum(bill.cost for bill in world.provider.bills) == pytest.approx(expected.relayed, rel=0.01)
    status = await world.get("/relay/status")
    assert status["decisions"]["cold"] == expected.cold
