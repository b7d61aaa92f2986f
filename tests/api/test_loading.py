"""How far the loading is, shown where people look."""

import io

from rich.console import Console

from regrow.api.loading import LoadingLine


def test_without_a_terminal_each_step_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=100)
    with console.status("starting") as status:
        line = LoadingLine(console, status)
        for text, share in [("fetching", 0.1), ("fetching", 0.9), ("converting", None)]:
            line(text, share)
    assert console.file.getvalue() == "fetching\nconverting\n"


def test_on_a_terminal_one_live_line_shows_the_share() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with console.status("starting") as status:
        LoadingLine(console, status)("fetching", 0.256)
        assert status.status == "fetching 26%"
        LoadingLine(console, status)("allocating", None)
        assert status.status == "allocating"
