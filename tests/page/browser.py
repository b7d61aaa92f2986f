"""A page of the server in headless Chromium, and what is true of it whatever is done with it.

Chromium is the system's own; where there is none these tests are skipped.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

from playwright.sync_api import Browser, Locator, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"there is no Chromium: none of {', '.join(NAMES)} is on the PATH (apt-get install chromium)"
IN_TIME_MS = 60_000
DESKTOP, PHONE = (1280, 860), (390, 800)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@dataclass
class Opened:
    """One tab. errors: what the console said of errors; addresses: all that was asked for."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def view(self, name: str) -> None:
        self.page.get_by_role("link", name=name, exact=True).click()
        self.page.locator(f"#{name.lower()}").wait_for()

    def ready(self) -> None:
        self.page.locator(".state[data-is=ready]").wait_for()

    def settings(self, system: str = "", longest: int | None = None) -> None:
        """Fill in the settings of the chat."""
        summary = self.page.get_by_text("Settings of this chat")
        summary.click()
        self.page.get_by_role("textbox", name="System prompt").fill(system)
        self.page.get_by_label("Longest answer, in tokens").fill("" if longest is None else str(longest))
        summary.click()

    def say(self, text: str) -> None:
        self.page.get_by_label("Your message").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def answered(self) -> Locator:
        """Wait for the end of the last answer; returns its turn."""
        self.page.get_by_role("button", name="Send").wait_for()
        return self.page.get_by_role("article").last


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light", *, calm: bool = True
) -> Iterator[Opened]:
    """Open the page. calm: it is an error when its console tells of one, or it speaks to anybody else."""
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(color_scheme=scheme, viewport=viewport, has_touch=size == PHONE)  # type: ignore[arg-type]
    context.set_default_timeout(IN_TIME_MS)
    page = context.new_page()
    tab = Opened(page, url)
    page.on("console", lambda message: tab.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: tab.errors.append(str(error)))
    page.on("request", lambda request: tab.addresses.append(request.url))
    page.on("websocket", lambda socket: tab.addresses.append(socket.url.replace("ws", "http", 1)))
    page.goto(f"{url}/")
    yield tab
    if calm:
        assert tab.errors == []
    elsewhere = [address for address in tab.addresses if not address.startswith((f"{url}/", "data:"))]
    assert elsewhere == []
    context.close()
