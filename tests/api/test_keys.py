"""Whoever shows a key is let in, and nobody else, on every route that shows or does anything."""

import re

import openai
import pytest

from regrow.api.keys import Keys
from regrow.api.routes import ROUTES
from tests.api.conftest import Start, chat_body
from tests.api.stub import StubEngine

TWO = ("first-key", "second-kéy")
KEYED = [route for route in ROUTES if not route.keyless]


@pytest.mark.parametrize("key", TWO)
@pytest.mark.parametrize("style", ["Authorization: Bearer {}", "authorization: bearer {}", "X-API-Key: {}"])
async def test_each_key_is_taken_in_both_headers(
    start: Start, engine: StubEngine, key: str, style: str
) -> None:
    served = await start(engine, api_keys=TWO)
    name, _, value = style.format(key).partition(": ")
    async with served.http.get("/v1/models", headers={name: value}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-kez"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"X-API-Key": ""},
        {"X-API-Key": "first-key,second-key"},
    ],
)
async def test_anything_else_is_a_401_in_the_usual_shape(
    start: Start, engine: StubEngine, headers: dict[str, str]
) -> None:
    served = await start(engine, api_keys=TWO)
    async with served.http.get("/v1/models", headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert not any(key in str(error) for key in TWO)


@pytest.mark.parametrize("route", KEYED, ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_of_the_table_asks_for_a_key(start: Start, engine: StubEngine, route) -> None:
    served = await start(engine, api_keys=TWO)
    path = re.sub(r"\{[^}]*\}", "x", route.path)
    async with served.http.request(route.method, path, json={}) as response:
        assert response.status == 401
    assert not engine.runs


async def test_only_the_page_health_and_ready_are_answered_without_a_key(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine, api_keys=TWO)
    for path, status in {"/": 200, "/health": 200, "/ready": 200, "/nowhere": 401, "/v1/models": 401}.items():
        for method in ("GET", "HEAD"):
            async with served.http.request(method, path) as response:
                assert response.status == status, path
    async with served.http.post("/health") as response:
        assert response.status == 401


async def test_the_official_client_is_let_in_by_its_key(start: Start, engine: StubEngine) -> None:
    served = await start(engine, api_keys=TWO)
    with pytest.raises(openai.AuthenticationError):
        await served.openai.models.list()
    client = served.openai.with_options(api_key="first-key")
    answer = await client.chat.completions.create(**chat_body())
    assert answer.choices[0].message.content


async def test_without_keys_everybody_is_let_in(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.http.get("/v1/models", headers={"Authorization": "Bearer anything"}) as response:
        assert response.status == 200


def test_every_known_key_is_compared_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = Keys(["a", "b", "c"])
    assert keys.admit(["a"])
    assert len(set(compared)) == 3
