"""How far the loading is, shown where people look."""

import asyncio
import io
import threading

import pytest
from rich.console import Console

from regrow.actors import engine as engine_module
from regrow.actors.engine import Engine
from regrow.api.loading import LoadingLine
from regrow.config import EngineSettings
from regrow.models.progress import Progress, Stopped


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


async def test_loading_that_nobody_waits_for_ends_with_the_step_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, left, ended = threading.Event(), threading.Event(), threading.Event()

    def load(settings: EngineSettings, progress: Progress) -> None:
        progress("loading", None)
        begun.set()
        left.wait(10)
        try:
            progress("allocating", None)
        except Stopped:
            ended.set()
            raise

    monkeypatch.setattr(engine_module, "load_served", load)

    async def opened() -> None:
        async with Engine.open(EngineSettings()):
            pytest.fail("it was opened")

    opening = asyncio.ensure_future(opened())
    await asyncio.to_thread(begun.wait, 10)
    opening.cancel()
    asyncio.get_running_loop().call_later(0.1, left.set)
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert ended.is_set()
