"""The page on a real server with a small random model: chatting, watching, by mouse and by keyboard, on a
desk and on a phone, in light and in dark."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.server import Server
from tests.page.browser import DESKTOP, IN_TIME_MS, PHONE, Opened, opened
from tests.page.looks import check

expect.set_options(timeout=IN_TIME_MS)
REUSED = re.compile(r"Reused\s([\d,]+)\stokens\sfrom.*read\s([\d,]+)")
WATCH = """() => {
  window.said = [];
  new MutationObserver(() => {
    for (const bar of document.querySelectorAll("[role=progressbar]"))
      window.said.push([bar.ariaValueNow, bar.closest(".answer").textContent]);
  }).observe(document.getElementById("log"), { childList: true, subtree: true, attributes: true });
}"""


def prompt(name: str, times: int = 120) -> str:
    """A system prompt that no other test has, of about 40 tokens a time."""
    return f"You are {name}. " + "Answer in short and simple words. " * times


@contextlib.contextmanager
def decoding(server: Server, text: str) -> Iterator[None]:
    """Somebody else's answer, which comes for as long as the block lasts."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 30_000,
        "ignore_eos": True,
        "stream": True,
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    try:
        yield
    finally:
        response.close()
        connection.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_chat_shows_how_it_is_read_and_its_second_turn_what_was_reused(
    browser: Browser, server: Server, size: tuple[int, int], scheme: str
) -> None:
    with opened(browser, server.url, size, scheme) as tab:
        tab.ready()
        check(tab.page)
        tab.settings(prompt(f"{scheme} and {size}"), longest=24)
        tab.page.evaluate(WATCH)
        tab.say("What is in <b>the sea</b>, and `where`?")
        first = tab.answered()
        expect(first).to_contain_text("What is in <b>the sea</b>")
        expect(first).to_contain_text("Why not more:")
        positions = [int(now) for now, text in tab.page.evaluate("said") if "Reading:" in text]
        assert len(set(positions)) > 2
        assert positions == sorted(positions)
        tab.say("And in the sky?")
        second = tab.answered()
        expect(second).to_contain_text(REUSED)
        reused = REUSED.search(second.inner_text())
        assert reused
        kept, read = (int(number.replace(",", "")) for number in reused.groups())
        assert kept > 10 * read
        check(tab.page)
        for view in ("Monitor", "About"):
            tab.view(view)
            expect(tab.page.locator("main > section:not([hidden]) table").first).to_be_visible()
            check(tab.page)


def test_the_monitor_shows_two_slots_decode_and_what_is_kept(browser: Browser, server: Server) -> None:
    with opened(browser, server.url, scheme="dark") as tab:
        tab.ready()
        tab.settings(prompt("watched"), longest=8)
        tab.say("Hello")
        tab.answered()
        tab.view("Monitor")
        page = tab.page
        expect(page.locator("#roots table")).to_be_visible()
        expect(page.locator("#disk table")).to_be_visible()
        with decoding(server, "One"), decoding(server, "Two"):
            expect(page.locator(".badge[data-phase=decoding]")).to_have_count(2)
            for number in range(2):
                slot = page.locator(".slot").nth(number)
                expect(slot).to_contain_text(re.compile(r"\d answered · [\d.,]+ tokens a second"))
            check(page)
        expect(page.locator(".badge[data-phase=idle]")).to_have_count(2)
        forgets = page.get_by_role("button", name=re.compile("Forget the system prompt"))
        forgets.first.click()
        expect(page.locator("#forgotten")).to_have_text("1 entry forgotten.")


def test_a_changed_system_prompt_is_named_as_the_reason(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as tab:
        tab.ready()
        for hour in ("nine", "ten"):
            tab.settings(f"It is {hour} o'clock. {prompt('late')}", longest=4)
            tab.say("What time is it?")
            turn = tab.answered()
        expect(turn).to_contain_text("Why not more:")
        expect(turn.locator("mark")).to_contain_text("ten o'clock")


def test_everything_is_done_by_keyboard(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as tab:
        tab.ready()
        keys = tab.page.keyboard
        keys.press("Shift+Tab")
        keys.press("Enter")
        keys.press("Tab")
        keys.type(prompt("typed", 2))
        reach(tab, "Longest answer, in tokens")
        keys.type("8")
        reach(tab, "Your message")
        keys.type("Hello")
        keys.press("Shift+Enter")
        keys.type("there")
        keys.press("Enter")
        expect(tab.answered()).to_contain_text("Hello\nthere")
        reach(tab, "Monitor")
        keys.press("Enter")
        expect(tab.page.locator("#slots .slot")).to_have_count(2)
        reach(tab, "Chat")
        keys.press("Enter")
        reach(tab, "Edit this message")
        keys.press("Enter")
        expect(tab.page.get_by_label("Your message")).to_have_value("Hello\nthere")
        expect(tab.page.get_by_label("Your message")).to_be_focused()
        assert tab.page.get_by_role("article").count() == 0


def reach(tab: Opened, name: str) -> None:
    """Press Tab until what has this name has the focus, and assert that one sees it."""
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        found, outline = tab.page.evaluate("""() => {
          const at = document.activeElement;
          const name = at.ariaLabel ?? at.labels?.[0]?.textContent ?? at.textContent;
          return [name, getComputedStyle(at).outlineStyle];
        }""")
        if found.strip() == name:
            assert outline != "none"
            return
    raise AssertionError(f"{name!r} cannot be reached by Tab")
