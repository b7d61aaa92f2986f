"""Answers are the same with the cache on and off; only what is read differs."""

from tests.e2e.conftest import HYBRID
from tests.e2e.server import Server, serving
from tests.e2e.talk import Turn, talk

SYSTEM = "Every green hill is steep. " * 20
QUESTIONS = ("How steep?", "And how high is the highest of them?", "Who says so?")


def texts(turns: list[Turn]) -> list[str]:
    return [turn.text for turn in turns]


def reused(turns: list[Turn]) -> list[int]:
    return [turn.regrow["reused"] for turn in turns]


async def test_answers_are_the_same_with_the_cache_off_for_a_request_or_for_the_server(
    hybrid: Server,
) -> None:
    async with hybrid.client() as client:
        on = await talk(client, hybrid.model, SYSTEM, QUESTIONS)
        off = await talk(client, hybrid.model, SYSTEM, QUESTIONS, regrow={"cache": "off"})
    with serving(*HYBRID, "--cache", "off", "--debug-digest") as server:
        async with server.client() as client:
            never = await talk(client, server.model, SYSTEM, QUESTIONS)
            cache = (await client.status())["cache"]
    assert texts(on) == texts(off) == texts(never)
    assert len(set(texts(on))) == len(QUESTIONS)
    assert all(reused(on)[1:])
    assert reused(off) == reused(never) == [0, 0, 0]
    assert {turn.regrow["why"] for turn in (*off, *never)} == {"The cache is off for this request."}
    assert len({turn.regrow["digest"] for turn in never}) == len(QUESTIONS)
    assert not any("digest" in turn.regrow for turn in on)
    assert cache["budget"] == sum(cache["used"].values()) == 0
