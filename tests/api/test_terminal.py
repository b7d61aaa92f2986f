"""The terminal chat: what it prints, what it keeps, and how it takes bad news."""

import asyncio
import dataclasses
import io
import itertools
import signal
import sys

import pytest
from rich.console import Console

from regrow.api.client import Unanswered
from regrow.api.terminal import Chat, Reply, command, facts, progress_line
from regrow.errors import DeviceFailed, Overloaded
from tests.api.conftest import Start
from tests.api.stub import (
    MOUNTED,
    QUEUED,
    TEXT,
    TOKENS,
    WHOLE_LIFE,
    Hold,
    StubEngine,
    StubModel,
    failed,
    finished,
)

FACTS = {
    "regrow": {"reused": 4096, "read": 37, "source": "live", "why": None},
    "usage": {"completion_tokens": 11},
}


def chat_at(url: str, system: str = "") -> tuple[Chat, io.StringIO]:
    """A chat that prints into a buffer, with a clock that goes half a second a look."""
    out = io.StringIO()
    clock = itertools.count(1, 0.5).__next__
    return Chat(url, system, Console(file=out, width=100, highlight=False, markup=False), clock), out


async def test_a_server_with_keys_is_shown_one(start: Start, engine: StubEngine) -> None:
    served = await start(engine, api_keys=("key",))
    console = Console(file=io.StringIO())
    talk = Chat(served.url, "", console, key="key")
    await talk.connect()
    await talk.say("Hello")
    assert talk.messages[-1]["role"] == "assistant"
    with pytest.raises(Unanswered, match="give a valid key"):
        await Chat(served.url, "", console).connect()


async def test_an_answer_streams_and_is_followed_by_what_was_reused(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    talk, out = chat_at(served.url)
    await talk.connect()
    await talk.say("Hello")
    assert out.getvalue().splitlines() == [
        TEXT,
        "reused 64 (checkpoint) · read 36 · first token 0.50 s · 2.0 tokens/s",
        "why: the system prompt changed at 'Current time: 15:09:34'",
    ]


async def test_the_conversation_grows_by_the_question_and_the_answer(
    start: Start, engine: StubEngine
) -> None:
    served = await start(engine)
    talk, _ = chat_at(served.url.removeprefix("http://") + "/v1/", system="Be brief.")
    await talk.connect()
    await talk.say("Hello")
    await talk.say("More")
    assert engine.requests[-1].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "More"},
    ]


async def test_a_model_without_a_chat_template_is_told_at_the_start(start: Start) -> None:
    served = await start(StubEngine(info=StubModel(has_template=False)))
    talk, _ = chat_at(served.url)
    with pytest.raises(Unanswered, match=r"stub has no chat template; use http://.*/v1/completions"):
        await talk.connect()


async def test_a_refused_message_is_told_and_forgotten(start: Start, engine: StubEngine) -> None:
    served = await start(engine)
    talk, _ = chat_at(served.url)
    await talk.connect()
    engine.refuse_with = Overloaded("64 requests wait already")
    with pytest.raises(Unanswered, match="64 requests wait already"):
        await talk.say("Hello")
    assert talk.messages == []


async def test_an_answer_that_breaks_off_stays_in_the_conversation(start: Start) -> None:
    served = await start(StubEngine([*TOKENS, failed(DeviceFailed("out of memory"))]))
    talk, out = chat_at(served.url)
    await talk.connect()
    with pytest.raises(Unanswered, match="out of memory"):
        await talk.say("Hello")
    assert out.getvalue() == "Grüße dir\n"
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


async def test_a_cancelled_answer_ends_its_run(start: Start) -> None:
    engine = StubEngine([*TOKENS, Hold(), finished()])
    served = await start(engine)
    talk, _ = chat_at(served.url)
    await talk.connect()
    answer = asyncio.create_task(talk.say("Hello"))
    run = await engine.started.get()
    await run.waiting.wait()
    answer.cancel()
    await run.cancelled.wait()


async def test_the_text_of_an_answer_cannot_control_the_terminal(start: Start) -> None:
    token = dataclasses.replace(TOKENS[0], text="\x1b[2Ja\x07[bold]\x9b1m")
    served = await start(StubEngine([token, finished(text="")]))
    talk, out = chat_at(served.url)
    await talk.connect()
    await talk.say("Hello")
    assert out.getvalue().splitlines()[0] == "[2Ja[bold]1m"


async def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    talk, _ = chat_at("http://127.0.0.1:9")
    with pytest.raises(Unanswered, match=r"no connection to http://127\.0\.0\.1:9"):
        await talk.connect()


def test_reading_progress_says_how_far_and_how_long() -> None:
    reading = {"phase": "reading", "position": 1024, "total": 4096, "eta_ms": 6100.0}
    assert progress_line(reading) == "reading 1,024 of 4,096 tokens, 6 s left"
    assert progress_line({"phase": "queued", "ahead": 2}) == "queued, 2 ahead"


def test_the_facts_fit_a_line_and_leave_out_what_is_not_known() -> None:
    reply = Reply(begun=1.0, first=1.42, last=2.42, **FACTS)
    assert facts(reply) == ["reused 4,096 (live) · read 37 · first token 0.42 s · 10.0 tokens/s"]
    assert facts(Reply(begun=1.0, **FACTS)) == ["reused 4,096 (live) · read 37"]
    assert facts(Reply(begun=1.0)) == []


def test_commands_change_the_conversation_and_are_not_messages() -> None:
    talk, out = chat_at("http://127.0.0.1:9", system="Old.")
    talk.messages.append({"role": "user", "content": "x"})
    console = Console(file=out, width=100)
    assert not command(talk, "hello /reset", console)
    assert command(talk, "/reset", console)
    assert talk.messages == [{"role": "system", "content": "Old."}]
    assert command(talk, "/system  New one. ", console)
    assert talk.messages == [{"role": "system", "content": "New one."}]
    assert command(talk, "/system", console)
    assert talk.messages == []
    assert command(talk, "/help", console)
    assert "/reset" in out.getvalue()
    assert command(talk, "/fly", console)
    assert "there is no /fly" in out.getvalue()


async def test_a_chat_works_over_pipes_line_by_line(start: Start) -> None:
    engine = StubEngine([QUEUED, MOUNTED, *WHOLE_LIFE])
    served = await start(engine)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "regrow", "chat", "--url", served.url, "--system", "Be brief."),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate(b"Hello\n\n/reset\nAgain\n")
    assert process.returncode == 0
    assert out.decode().count(TEXT) == 2
    assert [len(request.messages) for request in engine.requests] == [2, 2]


async def test_ctrl_c_cancels_the_answer_and_the_chat_goes_on(start: Start) -> None:
    engine = StubEngine([*TOKENS, Hold(), finished()])
    served = await start(engine)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "regrow", "chat", "--url", served.url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has none
    )
    process.stdin.write(b"Hello\n")
    run = await engine.started.get()
    await run.waiting.wait()
    await process.stdout.readuntil(b"dir")
    process.send_signal(signal.SIGINT)
    await run.cancelled.wait()
    engine.script = WHOLE_LIFE
    out, _ = await process.communicate(b"Again\n")
    assert process.returncode == 0
    assert out.decode().splitlines()[1:3] == ["cancelled", TEXT]
    assert [message["content"] for message in engine.requests[1].messages] == ["Hello", "Grüße dir", "Again"]


async def test_a_chat_without_a_server_ends_with_one_line(start: Start) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "regrow", "chat", "--url", "http://127.0.0.1:9"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err.decode().startswith("regrow: no connection to http://127.0.0.1:9: Connection refused (")
    assert err.count(b"\n") == 1
