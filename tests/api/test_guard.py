"""Browsers reach the server only from its own pages."""

import pytest

from regrow.api.guard import is_loopback
from tests.api.conftest import Start, chat_body
from tests.api.stub import StubEngine


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"]
)
def test_a_loopback_host_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil.org", "127.0.0.1.evil.org"]
)
def test_any_other_host_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "host", ["evil.org", "evil.org:8420", "10.0.0.1", "[::2]:80", "[", ":", "127.0.0.1@evil.org"]
)
async def test_a_foreign_host_header_is_refused_on_loopback(
    start: Start, engine: StubEngine, host: str
) -> None:
    served = await start(engine)
    async with served.http.get("/v1/models", headers={"Host": host}) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (403, "refused")


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8420", "[::1]:8420", "[::1]"])
async def test_any_name_of_this_machine_is_taken(start: Start, engine: StubEngine, host: str) -> None:
    served = await start(engine)
    async with served.http.get("/v1/models", headers={"Host": host}) as response:
        assert response.status == 200


async def test_an_open_server_takes_any_host(start: Start, engine: StubEngine) -> None:
    served = await start(engine, host="0.0.0.0")
    async with served.http.get("/v1/models", headers={"Host": "box.lan:8420"}) as response:
        assert response.status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("origin", ["http://evil.org", "null", "", "http://127.0.0.1:1", "https://localhost"])
async def test_a_foreign_origin_is_refused(start: Start, engine: StubEngine, host: str, origin: str) -> None:
    served = await start(engine, host=host)
    async with served.http.get("/v1/models", headers={"Origin": origin}) as response:
        assert response.status == 403


async def test_the_servers_own_origin_is_taken(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.http.get("/v1/models", headers={"Origin": served.url}) as response:
        assert response.status == 200


PAGE = "https://page.example:8443"


@pytest.mark.parametrize("cors", [(PAGE,), ("http://other.example", PAGE), ("*",)])
async def test_pages_of_an_allowed_origin_may_ask_send_and_read(
    start: Start, engine: StubEngine, cors: tuple[str, ...]
) -> None:
    served = await start(engine, cors=cors, api_keys=("key",))
    asking = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with served.http.options("/v1/chat/completions", headers=asking) as asked:
        assert asked.status == 204
    headers = {"Origin": PAGE, "Authorization": "Bearer key"}
    async with served.http.post("/v1/chat/completions", json=chat_body(stream=True), headers=headers) as sent:
        assert sent.status == 200
    async with served.http.get("/v1/models", headers={"Origin": PAGE}) as refused:
        assert refused.status == 401
    for response in (asked, sent, refused):
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Vary"] == "Origin"
    assert "Authorization" in asked.headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize("origin", ["http://page.example:8443", "https://page.example", "null"])
async def test_other_origins_stay_refused_and_are_shown_nothing(
    start: Start, engine: StubEngine, origin: str
) -> None:
    served = await start(engine, cors=(PAGE,))
    for method in ("GET", "OPTIONS"):
        async with served.http.request(method, "/v1/models", headers={"Origin": origin}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_an_allowed_origin_does_not_excuse_a_foreign_host(start: Start, engine: StubEngine) -> None:
    served = await start(engine, cors=("*",))
    headers = {"Origin": "http://evil.org", "Host": "evil.org"}
    async with served.http.get("/v1/models", headers=headers) as response:
        assert response.status == 403
