"""What is told of the last answers: their times and tokens, and nothing of those who wait."""

import pytest

from regrow.actors.events import Finished, Queued, ReadDone, Token
from regrow.api.recent import KEPT, Recent
from regrow.errors import DeviceFailed
from tests.api.conftest import Start, chat_body
from tests.api.stub import REUSE, USAGE, StubEngine, failed


def told(*events: object) -> Recent:
    recent = Recent()
    for event in events:
        recent.heard("a", event)  # type: ignore[arg-type]
    return recent


def finished(at: float) -> Finished:
    return Finished(at, "length", "", USAGE, REUSE)


def test_an_answer_is_told_with_its_first_token_and_its_longest_gap() -> None:
    tokens = [Token(at, 5, "x") for at in (3.0, 3.25, 4.75, 5.0)]
    (answer,) = told(Queued(1.0, 0), ReadDone(2.5, 0, 9, 1.0), *tokens, finished(5.5)).answers
    assert (answer.ttft_s, answer.gap_s, answer.ended_at, answer.ended) == (2.0, 1.5, 5.5, "length")
    assert (answer.prompt, answer.reused, answer.drawn, answer.source) == (100, 64, 3, "checkpoint")


@pytest.mark.parametrize(
    ("tokens", "ttft_s", "gap_s"), [((), None, None), ((3.0,), 2.0, None), ((3.0, 3.0), 2.0, 0.0)]
)
def test_what_an_answer_never_had_is_none(
    tokens: tuple[float, ...], ttft_s: float | None, gap_s: float | None
) -> None:
    (answer,) = told(Queued(1.0, 0), *(Token(at, 5, "x") for at in tokens), finished(4.0)).answers
    assert (answer.ttft_s, answer.gap_s) == (ttft_s, gap_s)


def test_a_failure_is_told_by_its_name() -> None:
    (answer,) = told(Queued(1.0, 0), failed(DeviceFailed("the text of a user"))).answers
    assert answer.ended == "DeviceFailed"
    assert "user" not in str(answer)


def test_who_has_not_ended_or_was_there_before_is_not_told() -> None:
    assert told(Queued(1.0, 0), Token(2.0, 5, "x")).answers == ()
    assert told(Token(2.0, 5, "x"), finished(3.0)).answers == ()


def test_only_the_last_ones_are_kept_the_newest_last() -> None:
    recent = Recent()
    for number in range(KEPT + 10):
        recent.heard(str(number), Queued(float(number), 0))
        recent.heard(str(number), finished(float(number)))
    assert [answer.ended_at for answer in recent.answers] == [float(n) for n in range(10, KEPT + 10)]


async def test_the_status_tells_the_last_answers(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    await served.post(chat_body())
    _, status = await served.get("/v1/status")
    assert status["recent"] == [
        {
            "ended_at": 2.0,
            "ended": "stop",
            "ttft_s": 1.4,
            "gap_s": pytest.approx(0.1),
            "prompt": 100,
            "reused": 64,
            "drawn": 3,
            "source": "checkpoint",
        }
    ]
