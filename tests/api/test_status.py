"""What the server says of itself, before and after the model is loaded."""

import dataclasses
import json
from pathlib import Path

import pytest

from regrow.cli import SERVE, all_options
from regrow.config import EngineSettings, ServerSettings
from tests.api.conftest import Start, chat_body
from tests.api.stub import StubEngine, StubModel


async def test_a_ready_server_says_so(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    status, body = await served.get("/health")
    assert (status, body["status"]) == (200, "ready")
    assert await served.get("/ready") == (200, {"ready": True, "status": "ready"})


async def test_while_the_model_loads_the_process_is_healthy_and_takes_no_work(start: Start) -> None:
    served = await start(None)
    status, body = await served.get("/health")
    assert (status, body["status"]) == (200, "loading")
    assert await served.get("/ready") == (503, {"ready": False, "status": "loading"})
    for path in ("/v1/models", "/v1/models/stub", "/v1/status"):
        status, body = await served.get(path)
        assert (status, body["error"]["code"]) == (503, "loading")
    async with served.http.post("/v1/chat/completions", json=chat_body()) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "5")


async def test_an_engine_that_takes_no_work_is_healthy_and_not_ready(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    engine.ready = False
    assert (await served.get("/health"))[0] == 200
    assert await served.get("/ready") == (503, {"ready": False, "status": "unavailable"})


async def test_the_status_is_the_engines_report_with_the_servers_facts(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine, served_names=("a", "b"))
    status, body = await served.get("/v1/status")
    assert status == 200
    assert body["slots"] == [{"slot": 0, "phase": "idle"}]
    assert body["served_names"] == ["a", "b"]
    assert body["status"] == "ready"


async def test_models_lists_the_models_own_name(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    models = await served.openai.models.list()
    assert [(m.id, m.object, m.owned_by, m.created) for m in models.data] == [
        ("stub", "model", "regrow", 1_700_000_000)
    ]
    assert models.data[0].model_extra == {"context_length": 4096, "capabilities": ["chat", "completions"]}


async def test_models_says_which_model_has_no_chat_template(start: Start) -> None:
    served = await start(StubEngine(info=StubModel(has_template=False)))
    model = await served.openai.models.retrieve("stub")
    assert model.model_extra["capabilities"] == ["completions"]


async def test_a_model_is_served_under_the_names_it_is_given_and_no_other(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine, served_names=("small", "org/large"))
    assert [m.id for m in (await served.openai.models.list()).data] == ["small", "org/large"]
    assert (await served.openai.models.retrieve("org/large")).id == "org/large"
    assert (await served.get("/v1/models/stub"))[1]["error"]["code"] == "model_not_found"
    assert (await served.post(chat_body(model="stub")))[0] == 404
    status, answer = await served.post(chat_body(model="small"))
    assert (status, answer["model"]) == (200, "small")


@pytest.mark.parametrize("given", ["bad id", "x" * 200, "ä"])
async def test_a_request_id_that_could_spoil_a_log_is_replaced(
    start: Start, engine: StubEngine, given: str
) -> None:
    served = await start(engine)
    async with served.http.get("/health", headers={"X-Request-Id": given}) as response:
        assert response.headers["X-Request-Id"] != given


async def test_requests_on_one_connection_have_ids_of_their_own(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    ids = set()
    for _ in range(3):
        async with served.http.get("/health") as response:
            ids.add(response.headers["X-Request-Id"])
    assert len(ids) == 3


async def test_what_was_left_out_of_a_conversation_can_be_fetched(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.http.get("/v1/cache/originals/ab") as response:
        assert (response.status, await response.text()) == (200, "Grüße")
    assert (await served.get("/v1/cache/originals/cd"))[0] == 404


async def test_the_cache_shows_what_is_kept_and_forgets_it(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    assert await served.get("/v1/cache") == (
        200,
        {
            "budget": 1024,
            "parked": [],
            "roots": [{"prefix": "0a", "tokens": 300}],
            "disk": [{"name": "b"}],
        },
    )
    async with served.http.delete("/v1/cache") as response:
        assert (response.status, await response.json()) == (200, {"forgotten": 3})
    async with served.http.delete("/v1/cache/roots/0a") as response:
        assert (response.status, await response.json()) == (200, {"forgotten": 1})
    async with served.http.delete("/v1/cache/roots/ff") as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "root_not_found"


async def test_the_status_tells_the_settings_that_hold_and_no_key(start: Start, engine: StubEngine) -> None:
    engine.settings = EngineSettings(parallel=3, cache_dir=Path("/kept"), chat_template="{{ a secret }}")
    served = await start(engine, api_keys=("hidden-key", "another"), served_names=("a", "b"))
    async with served.http.get("/v1/status", headers={"x-api-key": "hidden-key"}) as response:
        text = await response.text()
    settings = json.loads(text)["settings"]
    held = {name: settings[name] for name in ("parallel", "cache-dir", "cache-mib", "served-model-name")}
    assert held == {"parallel": 3, "cache-dir": "/kept", "cache-mib": None, "served-model-name": ["a", "b"]}
    assert (settings["ctx"], settings["exact"], settings["tool-format"]) == (4096, "cache", "hermes")
    assert (settings["api-key"], settings["chat-template"]) == (2, "given")
    assert "hidden-key" not in text
    assert "secret" not in text


async def test_every_option_of_the_engine_and_the_server_is_among_the_settings(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    _, status = await served.get("/v1/status")
    fields = {field.name for kind in (EngineSettings, ServerSettings) for field in dataclasses.fields(kind)}
    options = {option.name for option in all_options(SERVE) if option.field in fields}
    assert options <= status["settings"].keys()
