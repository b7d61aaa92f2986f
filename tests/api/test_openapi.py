"""/openapi.json says what is really served, by the types that requests are checked with."""

import jsonschema
import pytest

from regrow.api.openapi import document
from regrow.api.routes import ROUTES
from tests.api.conftest import Start, chat_body
from tests.api.stub import StubEngine

DOCUMENT = document(ROUTES)


def body_schema(path: str) -> dict:
    """The schema of a route's body, with what it refers to."""
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    return {**content["application/json"]["schema"], "components": DOCUMENT["components"]}


async def test_it_is_served_and_names_every_route(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    assert await served.get("/openapi.json") == (200, DOCUMENT)
    named = {(method.upper(), path) for path, of in DOCUMENT["paths"].items() for method in of}
    assert len(named) == len(ROUTES)
    assert ("DELETE", "/v1/cache/roots/{id}") in named
    assert ("GET", "/v1/models/{name}") in named


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.body])
def test_the_schema_of_a_body_is_one_and_everything_it_refers_to_is_there(path: str) -> None:
    schema = body_schema(path)
    jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": 5}, schema)


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({}, True),
        ({"temperature": 2.1}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "robot"}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}}]}, True),
        ({"regrow": {"deadline_ms": 0}}, False),
    ],
)
async def test_the_schema_allows_what_the_server_takes(
    start: Start, engine: StubEngine, fields: dict[str, object], good: bool
) -> None:
    served = await start(engine)
    body = chat_body(**fields)
    found = [*jsonschema.Draft202012Validator(body_schema("/v1/chat/completions")).iter_errors(body)]
    status, _ = await served.post(body)
    assert (status == 200) is (not found) is good
