"""One browser and one real server for all tests of the page, which are not asynchronous: Playwright's own
loop runs in this thread while they do."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.e2e.server import Server, serving
from tests.page.browser import CHROMIUM, MISSING, chromium


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small model with running state, a disk tier, and chunks so small that reading can be seen."""
    kept = str(tmp_path_factory.mktemp("kept"))
    options = ("--parallel", "2", "--chunk", "64", "--threads", "1", "--cache-dir", kept)
    with serving("random:qwen3_5", *options) as served:
        yield served
