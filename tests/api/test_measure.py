"""`regrow bench --url`: what it asks of a server, and what it makes of the answers."""

import itertools

import pytest

from regrow.api.client import Server, Unanswered
from regrow.api.measure import HEADS, Answered, Load, measure, rows
from regrow.errors import DeviceFailed
from tests.api.conftest import Start
from tests.api.stub import TEXT, TOKENS, StubEngine, failed


async def measured(url: str, load: Load) -> list[list[Answered]]:
    return await measure(Server(url), load, itertools.count().__next__)


async def test_every_client_sends_all_it_was_told_again_under_one_system_prompt(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    turns = await measured(served.url, Load(clients=3, turns=2, tokens=7))
    assert [len(answers) for answers in turns] == [3, 3]
    first, second = engine.requests[:3], engine.requests[3:]
    assert len({request.messages[0]["content"] for request in engine.requests}) == 1
    assert len({request.messages[1]["content"] for request in first}) == 3
    for before, after in zip(first, second, strict=True):
        assert list(after.messages[:2]) == list(before.messages)
        assert [m["role"] for m in after.messages] == ["system", "user", "assistant", "user"]
        assert after.messages[2]["content"] == TEXT
        assert after.max_tokens == 7


async def test_no_two_runs_share_their_system_prompt(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    for _ in range(2):
        await measured(served.url, Load(1, 1, 1))
    one, other = engine.requests
    assert one.messages[0] != other.messages[0]


async def test_what_the_server_says_of_cached_tokens_is_told(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    ((answer,),) = await measured(served.url, Load(1, 1, 1))
    assert (answer.prompt, answer.cached, answer.drawn, answer.error) == (100, 64, 3, None)
    assert len(answer.arrivals) == 3
    assert answer.arrivals == sorted(answer.arrivals)


async def test_an_answer_that_fails_is_counted_and_the_others_go_on(start: Start) -> None:
    served = await start(StubEngine([*TOKENS, failed(DeviceFailed("out of memory"))]))
    turns = await measured(served.url, Load(2, 2, 1))
    assert [[answer.error for answer in answers] for answers in turns] == [["out of memory"] * 2] * 2
    assert [row[-1] for row in rows(turns)] == ["2", "2"]


async def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(Unanswered, match="no connection"):
        await measured("http://127.0.0.1:9", Load(1, 1, 1))


def test_a_row_holds_medians_and_the_worst_and_leaves_out_what_is_not_told() -> None:
    answers = [
        Answered(0.0, "a", [1.0, 1.01, 1.04], prompt=100, cached=60, drawn=5),
        Answered(0.0, "b", [3.0, 3.02], prompt=120, cached=80, drawn=3),
        Answered(0.0, error="gone"),
    ]
    (row,) = rows([answers])
    assert dict(zip(enumerate(HEADS), row, strict=True)) == {
        (0, "turn"): "1",
        (1, "prompt"): "110",
        (2, "cached"): "70",
        (3, "first text, s"): "2.00",
        (4, "worst"): "3.00",
        (5, "gap, ms"): "20",
        (6, "worst"): "30",
        (7, "tokens/s"): "100.0",
        (8, "failed"): "1",
    }
    (silent,) = rows([[Answered(0.0)]])
    assert silent == ("1", *["-"] * 7, "0")
