"""The page on a scripted engine: keys, errors, stopping, thoughts, and a server that goes away."""

import re

import pytest
from playwright.sync_api import Browser, expect

from regrow.actors.events import Token
from regrow.errors import DeviceFailed
from regrow.models.answer_reader import ThinkingTags
from tests.api.stub import (
    PLACED,
    PROGRESS,
    QUEUED,
    READ,
    TOKENS,
    Hold,
    Script,
    StubEngine,
    StubModel,
    failed,
    finished,
)
from tests.page.browser import DESKTOP, IN_TIME_MS, PHONE, opened
from tests.page.looks import check
from tests.page.scripted import DOING, MODEL, Facts, scripted

expect.set_options(timeout=IN_TIME_MS)
LIFE: Script = [QUEUED, PLACED, READ, *TOKENS, finished()]
STATUS = re.compile("/v1/status")


class Busy(StubEngine):
    """An engine that reads, has others wait, and keeps something of every kind."""

    def __init__(self) -> None:
        super().__init__(LIFE)
        reading = {"phase": "reading", "request": "a", "prompt": 1000, "reused": 200, "position": 600}
        counters = {"state": "full", "reason": "no room left", "used": 1 << 20}
        moved = {"written_bytes": 1 << 20, "written_s": 1.0, "restored_bytes": 0, "restored_s": 0.0}
        self.doing = {
            **DOING,
            "engine": {
                **DOING["engine"],
                "waiting": 3,
                "running": 1,
                "totals": {**DOING["engine"]["totals"], "misses": {"nothing known": 1, "no checkpoint": 7}},
                "copied": {"parked": {"nbytes": 1 << 20, "seconds": 0.5}},
            },
            "slots": [{**DOING["slots"][0], **reading, "length": 600, "checkpoints": [200]}],
            "cache": {
                "budget": 1 << 30,
                "used": {"root": 1 << 27, "checkpoint": 1 << 27, "parked": 1 << 28},
                "evictions": {"checkpoint": 4},
                "refusals": 0,
            },
            "disk": {"directory": "/kept", "budget": 1 << 30, "counters": {**counters, **moved}},
        }

    async def cache_report(self) -> tuple[object, object, object]:
        parked = {"name": "<b>parked-1</b>", "tokens": 2000, "nbytes": 2 << 20, "age_s": 7200.0, "uses": 3}
        root = {"prefix": "0123abcd" * 4, "tokens": 300, "age_s": 300.0, "uses": 2}
        record = {"name": "0000000012-chat-00", "kind": "chat", "tokens": 2000, "nbytes": 1 << 20}
        return {"parked": [parked]}, [root], [{**record, "used_at": 0.0, "uses": 0}]


def test_what_is_faint_nameless_or_too_wide_is_found(browser: Browser) -> None:
    with scripted(StubEngine(LIFE)) as server, opened(browser, server.url) as tab:
        tab.ready()
        check(tab.page)
        for spoil in (
            "document.documentElement.style.setProperty('--quiet', '#999')",
            "document.getElementById('send').textContent = ''",
            "document.getElementById('scroll').style.width = '2000px'",
        ):
            tab.page.evaluate(spoil)
            with pytest.raises(AssertionError):
                check(tab.page)
            tab.page.reload()
            tab.ready()


def test_a_server_with_keys_is_used_once_one_of_them_was_entered(browser: Browser) -> None:
    with (
        scripted(StubEngine(LIFE), api_keys=("secret-ключ",)) as server,
        opened(browser, server.url, calm=False) as tab,
    ):
        page = tab.page
        dialog = page.get_by_role("dialog", name="This server wants a key")
        expect(dialog).to_be_visible()
        check(page)
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Enter a key").click()
        page.get_by_role("textbox", name="Key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not take this key")
        page.get_by_role("textbox", name="Key").fill("secret-ключ")
        page.keyboard.press("Enter")
        tab.ready()
        tab.say("Hello")
        expect(tab.answered()).to_contain_text("Grüße dir!")
        page.reload()
        tab.ready()
        tab.view("About")
        page.get_by_role("button", name="Forget the key").click()
        expect(dialog).to_be_visible()


def test_thoughts_are_folded_away_and_can_be_read(browser: Browser) -> None:
    text = "<think>\nSo many ways.\n</think>\n\nIt is **four**:\n```\n2 + 2\n```\n"
    engine = StubEngine([QUEUED, READ, Token(1.0, 1, text), finished(text="")])
    engine.info = StubModel(thinking=ThinkingTags("<think>", "</think>"))
    with scripted(engine) as server, opened(browser, server.url) as tab:
        tab.ready()
        tab.say("2 + 2?")
        turn = tab.answered()
        expect(turn.get_by_text("So many ways.")).to_be_hidden()
        turn.get_by_text("Thoughts").click()
        expect(turn.get_by_text("So many ways.")).to_be_visible()
        expect(turn.locator("strong")).to_have_text("four")
        expect(turn.locator("pre")).to_have_text("2 + 2\n")
        tab.say("Sure?")
        tab.answered()
    said: Facts = dict(engine.requests[-1].messages[1])
    assert said["content"].startswith("It is **four**")
    assert said["reasoning_content"].strip() == "So many ways."


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_an_answer_is_stopped_and_tried_again(browser: Browser, by: str) -> None:
    hold = Hold()
    script: Script = [QUEUED, PLACED, PROGRESS, hold, *LIFE[2:]]
    engine = StubEngine(script)
    with scripted(engine) as server, opened(browser, server.url) as tab:
        tab.ready()
        tab.say("Hello")
        page = tab.page
        expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "80")
        expect(page.locator(".answer")).to_contain_text("Reading: 80 of 100 tokens, 500 a second, 40 ms left")
        check(page)
        if by == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press(by)
        expect(tab.answered()).to_contain_text("You stopped this answer.")
        server.do(hold.gate.set)
        page.get_by_role("button", name="Try again").click()
        expect(tab.answered()).to_contain_text("Grüße dir!")
        assert page.get_by_role("article").count() == 1


@pytest.mark.parametrize("leaving", ["New chat", "Edit this message"])
def test_an_answer_that_is_left_ends_and_does_not_come_into_what_follows(
    browser: Browser, leaving: str
) -> None:
    script: Script = [QUEUED, PLACED, READ, TOKENS[0], Hold(), *LIFE[2:]]
    engine = StubEngine(
        {"first": script, "second": [QUEUED, READ, Token(1.0, 1, "alone"), finished(text="")]}
    )
    with scripted(engine) as server, opened(browser, server.url) as tab:
        tab.ready()
        tab.say("first")
        page = tab.page
        expect(page.locator(".answer")).to_contain_text("Answering")
        page.get_by_role("button", name=leaving).click()
        tab.say("second")
        expect(tab.answered()).to_contain_text("alone")
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page.locator("#log")).not_to_contain_text("Grüße")
        assert engine.runs[0].cancelled.is_set()
        assert [message["content"] for message in engine.requests[1].messages] == ["second"]


def test_what_waits_is_told_so_and_an_error_in_its_own_words(browser: Browser) -> None:
    hold = Hold()
    engine = StubEngine([QUEUED, hold, READ, TOKENS[0], failed(DeviceFailed("the device broke"))])
    with scripted(engine) as server, opened(browser, server.url) as tab:
        tab.ready()
        tab.say("Hello")
        expect(tab.page.locator(".answer")).to_contain_text("In the queue, 2 requests before this one")
        server.do(hold.gate.set)
        turn = tab.answered()
        expect(turn.get_by_role("alert")).to_have_text("the device broke")
        check(tab.page)


def test_a_conversation_is_there_after_a_reload_and_gone_with_a_new_chat(browser: Browser) -> None:
    with scripted(StubEngine(LIFE)) as server, opened(browser, server.url) as tab:
        tab.ready()
        tab.say("Hello")
        tab.answered()
        tab.page.reload()
        tab.ready()
        expect(tab.page.get_by_role("article")).to_contain_text("Grüße dir!")
        tab.page.get_by_role("button", name="New chat").click()
        expect(tab.page.get_by_text("Start a conversation")).to_be_visible()
        tab.page.reload()
        expect(tab.page.get_by_text("Start a conversation")).to_be_visible()


def test_a_server_that_goes_away_is_noticed_by_chat_and_monitor(browser: Browser) -> None:
    engine = StubEngine([QUEUED, PLACED, Hold()])
    with scripted(engine) as server:
        address = server.url
        tabs = opened(browser, address, calm=False)
        tab = tabs.__enter__()
        tab.ready()
        tab.say("Hello")
        expect(tab.page.locator(".answer")).to_contain_text("Slot 1")
    expect(tab.answered().get_by_role("alert")).to_be_visible()
    expect(tab.page.get_by_role("button", name="Try again")).to_be_visible()
    tab.view("Monitor")
    expect(tab.page.get_by_text("The server cannot be reached.")).to_be_visible()
    expect(tab.page.locator("#state-text")).to_have_text("Not reachable")
    tabs.__exit__(None, None, None)


def test_a_model_without_a_chat_template_is_not_chatted_with(browser: Browser) -> None:
    engine = StubEngine()
    engine.doing = {**DOING, "model": {**MODEL, "has_template": False}}
    with scripted(engine) as server, opened(browser, server.url) as tab:
        tab.ready()
        expect(tab.page.get_by_placeholder("This model has no chat template")).to_be_visible()
        expect(tab.page.get_by_role("button", name="Send")).to_be_disabled()


def test_nothing_is_asked_of_the_server_while_the_page_is_hidden(browser: Browser) -> None:
    with scripted(StubEngine(LIFE)) as server, opened(browser, server.url) as tab:
        page = tab.page
        page.clock.install()
        page.reload()
        tab.view("About")
        tab.ready()
        with page.expect_request(STATUS):
            page.clock.run_for(60_000)
        page.evaluate("""() => {
          window.away = true;
          Object.defineProperty(document, "hidden", { get: () => window.away });
        }""")
        page.clock.run_for(1)
        asked = len(tab.addresses)
        page.clock.run_for(600_000)
        assert len(tab.addresses) == asked
        with page.expect_request(STATUS):
            page.evaluate("""() => {
              window.away = false;
              document.dispatchEvent(new Event("visibilitychange"));
            }""")


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "dark"), (PHONE, "light")], ids=["desktop", "phone"])
def test_the_monitor_tells_of_all_that_runs_and_is_kept(
    browser: Browser, size: tuple[int, int], scheme: str
) -> None:
    with scripted(Busy()) as server, opened(browser, server.url, size, scheme) as tab:
        tab.ready()
        tab.view("Monitor")
        page = tab.page
        expect(page.locator("#queue")).to_have_text("3 requests wait for a slot.")
        expect(page.locator(".slot").first).to_contain_text("600 of 1,000 tokens · 200 reused")
        expect(page.locator("#budget")).to_contain_text("512 MiB of 1.0 GiB used · 4 had to make room")
        expect(page.locator("#budget .legend")).to_contain_text("parked conversations: 256 MiB")
        expect(page.locator("#lanes")).to_contain_text(
            "copy from a parked conversation1.0 MiB0.50 s2.0 MiB/s"
        )
        expect(page.locator("#misses")).to_contain_text("no checkpoint7")
        expect(page.locator("#roots")).to_contain_text("0123abcd300300 KiB5 min2")
        expect(page.locator("#parked")).to_contain_text("<b>parked-1</b>2,0002.0 MiB2.0 h3")
        expect(page.locator("#disk")).to_contain_text("The disk is full: no room left.")
        expect(page.locator("#disk table")).to_contain_text("conversation 122,0001.0 MiB")
        check(page)
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Forget all that is kept").click()
        expect(page.locator("#forgotten")).to_have_text("3 entries forgotten.")
        tab.view("About")
        expect(page.locator("#settings")).to_contain_text("ctx4096")
        check(page)
