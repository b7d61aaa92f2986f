"""/metrics counts what happened, under vLLM's names where there are such."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from regrow.actors.events import Event, Finished, Placed, Queued, Reuse, Token, Usage
from regrow.api.metrics import Metrics
from regrow.errors import DeadlineExceeded
from tests.api.conftest import Served, Start, chat_body
from tests.api.stub import MOUNTED, PROGRESS, READ, REUSE, StubEngine, failed

Samples = dict[tuple[str, ...], float]
LIFE = (
    Queued(10.0, 0),
    Placed(10.5, 0, "checkpoint", 64, 100),
    MOUNTED,
    PROGRESS,
    READ,
    Token(12.0, 1, "a"),
    Token(12.25, 2, "b"),
    Token(12.75, 3, "c"),
    Finished(13.0, "stop", "", Usage(100, 3, 64), REUSE),
)


def samples(text: str) -> Samples:
    """What is told: (name, values of the labels in their order...) -> value."""
    families = text_string_to_metric_families(text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def heard(*events: Event, run: str = "r") -> Samples:
    metrics = Metrics("stub")
    for event in events:
        metrics.heard(run, event)
    return samples(metrics.exposition().decode())


async def scraped(served: Served) -> Samples:
    async with served.http.get("/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return samples(await response.text())


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("vllm:request_queue_time_seconds", 1, 0.5),
        ("vllm:time_to_first_token_seconds", 1, 2.0),
        ("vllm:inter_token_latency_seconds", 2, 0.75),
        ("vllm:request_prefill_time_seconds", 1, 0.03),
        ("vllm:e2e_request_latency_seconds", 1, 3.0),
        ("vllm:request_prompt_tokens", 1, 100),
        ("vllm:request_generation_tokens", 1, 3),
    ],
)
def test_times_are_those_of_the_events(name: str, count: int, total: float) -> None:
    told = heard(*LIFE)
    assert told[f"{name}_count", "stub"] == count
    assert told[f"{name}_sum", "stub"] == pytest.approx(total)


def test_tokens_are_counted_by_what_was_read_and_what_was_reused() -> None:
    told = heard(*LIFE)
    assert told["vllm:prompt_tokens_total", "stub"] == told["vllm:prefix_cache_queries_total", "stub"] == 100
    assert told["vllm:generation_tokens_total", "stub"] == 3
    assert told["vllm:prefix_cache_hits_total", "stub"] == 64
    assert told["regrow_prompt_tokens_total", "none", "read"] == 36
    assert told["regrow_prompt_tokens_total", "checkpoint", "reused"] == 64


def test_an_end_is_counted_once_by_its_reason_or_its_error() -> None:
    told = heard(*LIFE, *LIFE, LIFE[0], failed(DeadlineExceeded("late")))
    assert told["vllm:request_success_total", "stop", "stub"] == 2
    assert told["regrow_request_failures_total", "DeadlineExceeded"] == 1
    assert told["vllm:e2e_request_latency_seconds_count", "stub"] == 3


def test_a_run_that_began_before_anybody_listened_is_left_out() -> None:
    assert heard(*LIFE[1:])["vllm:e2e_request_latency_seconds_count", "stub"] == 0


def test_nothing_is_kept_of_a_run_that_has_ended() -> None:
    metrics = Metrics("stub")
    for run in map(str, range(100)):
        for event in LIFE:
            metrics.heard(run, event)
    assert not metrics._lives


async def test_a_scrape_tells_of_what_was_served(start: Start, engine: StubEngine) -> None:
    served = await start(engine, served_names=("nice", "other"))
    await served.post(chat_body(model="other"))
    told = await scraped(served)
    assert told["vllm:request_success_total", "nice", "stop"] == 1
    assert told["vllm:inter_token_latency_seconds_count", "nice"] == 2
    assert told["vllm:num_requests_running", "nice"] == 0


async def test_a_scrape_tells_of_the_engines_own_figures(start: Start) -> None:
    engine = StubEngine()
    engine.doing = {
        "engine": {
            "waiting": 3,
            "running": 2,
            "totals": {"misses": {"nothing known": 4}},
            "copied": {"root": {"nbytes": 4096, "seconds": 0.5}},
        },
        "cache": {
            "budget": 100,
            "used": {"root": 60},
            "evictions": {"root": 7},
            "refusals": 1,
            "parked": [{}],
        },
        "roots": [{}, {}],
        "device": {
            "counters": {
                "chunks": 5,
                "read_s": 1.5,
                "steps": 6,
                "step_s": 0.25,
                "long_chunks": 3,
                "pauses": 4,
                "stalls": 2,
                "longest_wait_s": 0.5,
            }
        },
        "mailboxes": [{"name": "slot-0", "restarts": 1, "waiting": 2, "busy_s": 0.1}],
    }
    told = await scraped(await start(engine))
    assert told["vllm:num_requests_waiting", "stub"] == 3
    assert told["vllm:num_requests_running", "stub"] == 2
    assert told["regrow_misses_total", "nothing known"] == 4
    assert told["regrow_copied_bytes_total", "root"] == 4096
    assert told["regrow_copied_seconds_total", "root"] == 0.5
    assert told["regrow_cache_bytes", "root"] == 60
    assert told[("regrow_cache_budget_bytes",)] == 100
    assert told["regrow_cache_entries", "root"] == 2
    assert told["regrow_cache_entries", "parked conversation"] == 1
    assert told["regrow_evictions_total", "root"] == 7
    assert told[("regrow_refusals_total",)] == 1
    assert told["regrow_device_calls_total", "chunk"] == 5
    assert told["regrow_device_seconds_total", "step"] == 0.25
    assert told[("regrow_long_chunks_total",)] == 3
    assert told[("regrow_chunk_pauses_total",)] == 4
    assert told[("regrow_stalls_total",)] == 2
    assert told[("regrow_longest_wait_seconds",)] == 0.5
    assert told["regrow_actor_restarts_total", "slot-0"] == 1
    assert told["regrow_actor_mailbox", "slot-0"] == 2


async def test_a_scrape_tells_of_the_disk_tier_where_there_is_one(start: Start) -> None:
    engine = StubEngine()
    assert ("regrow_disk_used_bytes",) not in await scraped(await start(engine))
    counters = {"state": "read only", "records": 3, "used": 40, "set_aside": 1, "failed": 2}
    counters |= {"written_bytes": 50, "written_s": 0.5, "restored_bytes": 60, "restored_s": 0.25}
    engine.doing = {"disk": {"budget": 100, "counters": counters}}
    told = await scraped(await start(engine))
    assert told[("regrow_disk_writable",)] == 0
    assert told[("regrow_disk_used_bytes",)] == 40
    assert told[("regrow_disk_budget_bytes",)] == 100
    assert told["regrow_disk_records", "set aside"] == 1
    assert told["regrow_disk_bytes_total", "restored"] == 60
    assert told["regrow_disk_seconds_total", "written"] == 0.5
    assert told[("regrow_disk_failures_total",)] == 2


async def test_before_the_model_is_loaded_a_scrape_is_a_503(start: Start) -> None:
    served = await start(None)
    async with served.http.get("/metrics") as response:
        assert response.status == 503


def test_a_reuse_without_a_hit_names_no_source() -> None:
    cold = Reuse("none", 0, 0, 100, 0.0, 0.0, 0.0, "cache")
    told = heard(LIFE[0], Finished(1.0, "stop", "", Usage(100, 1, 0), cold))
    assert not any("reused" in key for key in told)
