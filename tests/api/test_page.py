"""The page: one document that needs nothing from anywhere else, and that a browser may do little with."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from regrow.api.page.page import SCRIPTS, assemble
from tests.api.conftest import Start
from tests.api.stub import StubEngine

TEXT = assemble().body.decode()
FILES = Path(__file__).parents[2] / "src" / "api" / "page"


class Elements(HTMLParser):
    """tags: every start tag with its attributes. inside: the texts of style and script elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.inside and data.strip():
            self.inside[self.tags[-1][0]].append(data)


def elements() -> Elements:
    parser = Elements()
    parser.feed(TEXT)
    return parser


async def test_it_is_html_that_is_looked_up_anew_and_guessed_at_by_nobody(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    async with served.http.get("/") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-cache"
        assert await response.text() == TEXT


async def test_its_policy_allows_its_own_script_and_style_and_this_server_alone(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    async with served.http.get("/") as response:
        header = response.headers["Content-Security-Policy"]
    policy = dict(part.split(" ", 1) for part in header.split("; "))
    inside = elements().inside
    for kind, directive in {"script": "script-src", "style": "style-src"}.items():
        (text,) = inside[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert policy == dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")


def test_it_loads_nothing_and_holds_no_handler_and_no_style_that_its_policy_forbids() -> None:
    for tag, attributes in elements().tags:
        assert "src" not in attributes
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        href = attributes.get("href") or ""
        assert href.startswith("data:" if tag == "link" else "#") or tag not in ("link", "a"), tag
    hosts = set(re.findall(r"https?://[^\s'\"`)]+", TEXT))
    assert hosts == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_it_asks_by_addresses_relative_to_its_own() -> None:
    asked = re.findall(r"(?:ask|forget|new URL)\([\"`]([^\"`]+)", TEXT)
    assert {"v1/status", "v1/cache", "v1/stream"} <= set(asked)
    assert not [address for address in asked if address.startswith("/")]


def test_every_file_beside_it_is_in_it() -> None:
    assert {path.name for path in FILES.glob("*.js")} == set(SCRIPTS)
    for path in (*FILES.glob("*.js"), *FILES.glob("*.css")):
        assert path.read_text() in TEXT


def test_every_place_that_the_scripts_fill_is_in_the_document_once() -> None:
    ids = [attributes["id"] for _, attributes in elements().tags if "id" in attributes]
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', TEXT))
    assert wanted
    assert wanted <= set(ids)
    assert len(ids) == len(set(ids))


async def test_it_is_served_without_a_key_and_while_the_model_loads_but_what_it_shows_is_not(
    start: Start,
) -> None:
    served = await start(None, api_keys=("secret",))
    for method in ("GET", "HEAD"):
        async with served.http.request(method, "/") as response:
            assert response.status == 200
    for path in ("/v1/status", "/v1/cache"):
        assert (await served.get(path))[0] == 401


@pytest.mark.parametrize("path", ["/page.html", "/page.css", "/main.js", "/index.html", "/page/"])
async def test_nothing_else_of_it_has_an_address(start: Start, engine: StubEngine, path: str) -> None:
    served = await start(engine)
    assert (await served.get(path))[0] == 404


async def test_it_is_not_served_under_a_foreign_name(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    async with served.http.get("/", headers={"Host": "evil.org"}) as response:
        assert response.status == 403
    async with served.http.post("/") as response:
        assert response.status == 405
