"""Make the picture of the README: `python -m tests.page.picture URL FILE`, with a server at URL that has just
begun to serve demo. It shows a chat of two turns, and the monitor while two more answers come."""

import base64
import sys
from pathlib import Path

from playwright.sync_api import expect

from tests.page.browser import IN_TIME_MS, chromium, opened

SIZE = (960, 700)
SYSTEM = "You are a guide who knows the cities of Europe well and answers in one or two short sentences. "
BESIDE = """<body style="margin: 0; display: flex; gap: 12px; background: #888">
<img src="data:image/png;base64,%s"><img src="data:image/png;base64,%s"></body>"""


def main(url: str, file: Path) -> None:
    pictures = []
    with chromium() as browser:
        with opened(browser, url, SIZE) as tab, opened(browser, url, SIZE, "dark") as watching:
            tab.ready()
            tab.settings(SYSTEM * 12)
            for text in ("What is the capital of France?", "And of Italy?"):
                tab.say(text)
                tab.answered()
            pictures.append(tab.page.screenshot())
            watching.ready()
            watching.view("Monitor")
            others = [opened(browser, url) for _ in range(2)]
            for number, other in enumerate(others):
                talk = other.__enter__()
                talk.ready()
                talk.settings(SYSTEM * 12, longest=200)
                talk.say(f"Tell me a long story about {number + 2} cities, with many details.")
            expect(watching.page.locator(".badge[data-phase=decoding]")).to_have_count(2, timeout=IN_TIME_MS)
            watching.page.wait_for_timeout(2500)
            pictures.append(watching.page.screenshot())
            for other in others:
                other.__exit__(None, None, None)
        page = browser.new_page(viewport={"width": 2 * SIZE[0] + 12, "height": SIZE[1]})
        page.set_content(BESIDE % tuple(base64.b64encode(picture).decode() for picture in pictures))
        page.screenshot(path=file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
