"""`regrow relay` as a command: what it refuses, and a whole life with a restart."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from regrow import cli
from regrow.config import RelaySettings
from tests.api.relay.server import KEY, FakeProvider
from tests.policy.prompts import chat

EVERY_OPTION = """
--upstream https://api.example/base --style openai --repack-cold --prune --dry-run
--host ::1 --port 0 --data-dir /d
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REGROW_")]:
        monkeypatch.delenv(name)


def settings(*argv: str) -> RelaySettings:
    arguments = cli.build_parser().parse_args(["relay", *argv])
    return cli.relay_settings(cli.values_of(cli.RELAY, arguments))


def test_every_option_reaches_its_setting() -> None:
    assert settings(*EVERY_OPTION.split()) == RelaySettings(
        upstream="https://api.example/base",
        style="openai",
        repack_cold=True,
        prune=True,
        dry_run=True,
        data_dir=Path("/d"),
        host="::1",
        port=0,
    )


def test_without_options_it_changes_nothing_and_keeps_its_state_with_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    expected = RelaySettings(upstream="http://a", data_dir=Path("/state/regrow"))
    assert settings("--upstream", "http://a") == expected
    assert not expected.repack_cold


@pytest.mark.parametrize(
    "argv, told",
    [
        ([], "--upstream: give the provider's URL"),
        (["--upstream", "api.anthropic.com"], "--upstream"),
        (["--upstream", "http://me:pw@a"], "--upstream: give the provider's URL alone"),
        (["--upstream", "http://a?key=1"], "--upstream"),
        (["--upstream", "http://a", "--dry-run"], "--dry-run: say what to try"),
        (["--upstream", "http://a", "--host", "0.0.0.0"], "--allow-open"),
        (["--upstream", "http://a", "--style", "gemini"], "--style"),
        (["--upstream", "http://a", "--repack-cold", "--data-dir", "/dev/null/x"], "--data-dir"),
        (["--upstream", "http://127.0.0.1:1", "--port", "1", "--data-dir", "/tmp"], "--port: 127.0.0.1:1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--port" in argv:
        monkeypatch.setattr(web.TCPSite, "start", refuse)
    assert cli.main(["relay", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"regrow: {told}") or told in err
    assert err.count("\n") == 1


async def refuse(_: web.TCPSite) -> None:
    raise PermissionError(13, "Permission denied")


@asynccontextmanager
async def relay_process(
    upstream: str, directory: Path
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    argv = ["relay", "--upstream", upstream, "--repack-cold", "--port", "0", "--data-dir", str(directory)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "regrow",
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        first = await asyncio.wait_for(process.stdout.readuntil(b"Relaying "), 60)
        assert first
        line = await process.stdout.readline()
        yield line.split()[0].decode(), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_latch_survives_the_end_of_the_process_and_a_kill(tmp_path: Path) -> None:
    """Between two lives the file's touch is set back, as if time had passed."""
    provider = FakeProvider(lambda: 0.0)
    runner = web.AppRunner(provider.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = f"http://127.0.0.1:{runner.addresses[0][1]}"
    body = {"model": "m", "system": "s" * 20_000, "messages": chat(20)}
    sizes = []
    for end in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        async with relay_process(upstream, tmp_path) as (url, process), aiohttp.ClientSession() as http:
            async with http.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEY}) as response:
                assert response.status == 200
            sizes.append(len(provider.received[-1].body))
            process.send_signal(end)
            code = await asyncio.wait_for(process.wait(), 60)
            assert code == (-signal.SIGKILL if end == signal.SIGKILL else 0)
        if len(sizes) == 1:
            file = tmp_path / "cold_prefix_touch.json"
            state = json.loads(file.read_text())
            (record,) = state["conversations"].values()
            record["touched"] -= 1000
            file.write_text(json.dumps(state))
    await runner.cleanup()
    assert sizes[1] == sizes[2] < sizes[0]
