"""The real server as a process of its own, and the clients that speak to it.

A server is ended by the id of its process, whatever happens in the block that it was started for.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import aiohttp
import openai

STOPS_WITHIN_S = 60  # then it is killed
Facts = Mapping[str, Any]


def regrow(*arguments: str) -> list[str]:
    """The command line of a `regrow` command in this environment."""
    return [sys.executable, "-m", "regrow", *arguments]


@dataclass(frozen=True)
class Client:
    """The official client, a plain one, and what the server says of itself."""

    openai: openai.AsyncOpenAI
    http: aiohttp.ClientSession

    async def status(self) -> Facts:
        async with self.http.get("/v1/status") as response:
            assert response.status == 200
            return await response.json()

    async def until(self, holds: Callable[[Facts], bool]) -> Facts:
        """Ask for the status until `holds` says yes to it."""
        while not holds(status := await self.status()):
            pass
        return status


@dataclass(frozen=True)
class Server:
    """errors: what it wrote to stderr, as a file."""

    model: str
    url: str
    process: "subprocess.Popen[str]"
    errors: IO[str]

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        official = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        async with aiohttp.ClientSession(self.url) as http, official:
            yield Client(official, http)


@contextlib.contextmanager
def serving(model: str, *options: str, command: Sequence[str] | None = None) -> Iterator[Server]:
    """Start `regrow serve MODEL` on a free port, logging warnings alone, and wait until it serves. command:
    in place of `regrow`."""
    arguments = ("serve", model, "--port", "0", "--log-level", "warning", *options)
    command = regrow(*arguments) if command is None else [*command, *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield Server(model, _address(process, errors), process, errors)
        finally:
            process.terminate()
            try:
                process.wait(STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[str]", errors: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Serving "):
            return line.split()[-1].removesuffix("/v1")
    process.wait()
    errors.seek(0)
    raise AssertionError(f"the server ended with {process.returncode}: {errors.read()}")
