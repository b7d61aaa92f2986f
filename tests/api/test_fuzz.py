"""Whatever is sent to any route of /openapi.json is answered: never a 500, never nothing.

3,000 cases, dealt over all routes of the document; a few more go to a real model. To find more than CI does:
FUZZ_CASES=100000 pytest tests/api/test_fuzz.py.
"""

import asyncio
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from regrow.actors.engine import Engine
from regrow.api.app import make_app, make_runner
from regrow.api.openapi import document
from regrow.api.port import EnginePort
from regrow.api.routes import ROUTES
from regrow.config import EngineSettings, ServerSettings
from tests.api.from_schema import TEXTS, Bodies
from tests.api.stub import StubEngine

CASES = int(os.environ.get("FUZZ_CASES", "3000"))
ON_A_MODEL = CASES // 50
BOUND_S = 30
DOCUMENT = document(ROUTES)
OPERATIONS = [(method.upper(), path) for path, of in DOCUMENT["paths"].items() for method in of]
WITH_BODY = [
    (method, path) for method, path in OPERATIONS if "requestBody" in DOCUMENT["paths"][path][method.lower()]
]
FEW = 40  # for a route without a body
BROKEN = (
    b"internal_error",
    b"unexpected error",
    b"device_failed",
    b"restarting",
    b"non_finite",
    b"form_broken",
    b"api_error",
    b"overloaded_error",
)
NAME = re.compile(r"\{\w+\}")
EACH = (CASES - FEW * (len(OPERATIONS) - len(WITH_BODY))) // len(WITH_BODY)
KNOWN = {
    "model": st.sampled_from(["stub"] * 20 + ["gpt-4", ""]),
    "stream": st.booleans(),
    "max_tokens": st.integers(1, 4),
    "max_completion_tokens": st.integers(1, 4),
    "max_output_tokens": st.integers(1, 4),
}
BODIES = Bodies(DOCUMENT, KNOWN, always={"max_tokens", "max_output_tokens", "content", "input"})
KINDS = st.sampled_from(["application/json"] * 40 + ["application/json; charset=latin-1", "text/plain", "x"])


def few(cases: int) -> Any:
    """The same cases in every run, without the time limits of hypothesis: these are this file's own."""
    return settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@dataclass
class Sent:
    """An engine that is served; `send` sends it one request and returns what came back."""

    runner: asyncio.Runner
    http: aiohttp.ClientSession

    def send(self, method: str, path: str, **request: Any) -> tuple[int, Mapping[str, str], bytes]:
        async def send() -> tuple[int, Mapping[str, str], bytes]:
            async with asyncio.timeout(BOUND_S), self.http.request(method, path, **request) as response:
                return response.status, response.headers, await response.read()

        return self.runner.run(send())


def serving(stack: AsyncExitStack, runner: asyncio.Runner, engine: EnginePort) -> Sent:
    async def begin() -> Sent:
        app = make_runner(make_app(engine, ServerSettings(served_names=("stub",))))
        await app.setup()
        stack.push_async_callback(app.cleanup)
        await web.TCPSite(app, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{app.addresses[0][1]}"
        return Sent(runner, await stack.enter_async_context(aiohttp.ClientSession(url)))

    return runner.run(begin())


@pytest.fixture(scope="module")
def scripted() -> Iterator[Sent]:
    """A server with a script for an engine."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield serving(stack, runner, StubEngine())
        runner.run(stack.aclose())


@pytest.fixture(scope="module")
def model() -> Iterator[Sent]:
    """A server with a small model."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        opening = Engine.open(EngineSettings(model="random:qwen3_5", parallel=2, context=1024, chunk=64))
        engine = runner.run(stack.enter_async_context(opening))
        yield serving(stack, runner, engine)
        runner.run(stack.aclose())


def check(status: int, headers: Mapping[str, str], answer: bytes, body: bytes = b"") -> None:
    """An answer is one that a client can act on, and says nothing of an error inside."""
    told = f"{status}: {answer[:500]!r} to {body[:2000]!r}"
    assert status in range(200, 500) or (status == 504 and b"not finished within" in answer), told
    assert not any(word in answer for word in BROKEN), told
    assert headers["X-Request-Id"]
    kind = headers.get("Content-Type", "")
    if kind.startswith("text/event-stream"):
        assert answer.endswith(b"\n\n"), told
    elif kind.startswith("application/json"):
        found = json.loads(answer)
        assert status < 400 or "error" in found or not answer.startswith(b'{"error'), told


def fuzz(sent: Sent, method: str, path: str, cases: int) -> None:
    schema = DOCUMENT["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]

    @few(cases)
    @given(body=BODIES.of(schema), kind=KINDS)
    def case(body: bytes, kind: str) -> None:
        check(*sent.send(method, path, data=body, headers={"Content-Type": kind}), body)

    case()


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_any_body_is_answered(scripted: Sent, method: str, path: str) -> None:
    fuzz(scripted, method, path, EACH)
    assert scripted.send("GET", "/ready")[0] == 200


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_any_body_is_answered_by_a_model_too(model: Sent, method: str, path: str) -> None:
    fuzz(model, method, path, ON_A_MODEL)
    assert model.send("GET", "/ready")[0] == 200


@pytest.mark.parametrize(("method", "path"), [one for one in OPERATIONS if one not in WITH_BODY])
def test_any_path_and_query_is_answered(scripted: Sent, method: str, path: str) -> None:
    names = NAME.findall(path)

    @few(FEW)
    @given(values=st.lists(TEXTS, min_size=len(names), max_size=len(names)), query=TEXTS, body=st.binary())
    def case(values: list[str], query: str, body: bytes) -> None:
        filled = path
        for name, value in zip(names, values, strict=True):
            filled = filled.replace(name, quote(value, safe="", errors="replace"))
        address = f"{filled}?{quote(query, errors='replace')}"
        check(*scripted.send(method, address, data=body), address.encode())

    case()


@pytest.mark.parametrize("path", sorted(DOCUMENT["paths"]))
def test_a_method_that_a_route_does_not_have_is_a_405_that_names_those_it_has(
    scripted: Sent, path: str
) -> None:
    address = path.replace("{", "").replace("}", "")
    allowed = {method for method, other in OPERATIONS if re.fullmatch(NAME.sub("[^/]+", other), address)}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - allowed:
        status, headers, answer = scripted.send(method, address)
        assert (status, "error" in json.loads(answer)) == (405, True)
        assert set(headers["Allow"].split(",")) - {"HEAD"} == allowed


def test_a_route_that_is_not_there_is_a_404_in_json(scripted: Sent) -> None:
    for path in ("/nowhere", "/v1", "/v1/chat/completions/", "/%00", "/v1/models/"):
        status, _, answer = scripted.send("GET", path)
        assert (status, json.loads(answer)["error"]["code"]) == (404, "not_found"), path
