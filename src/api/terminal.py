"""`regrow chat`: a chat with a server in the terminal. Streams, and says what each answer reused.

The loop that reads lines is plain and synchronous; each answer is one run of the event loop, so that Ctrl-C
cancels an answer and leaves the chat. Works with pipes: one line of input is one message.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.status import Status

from regrow.api.client import Server, Unanswered, Unreachable, chunks_of

HELP = """/reset        forget the conversation
/system TEXT  set the system prompt and forget the conversation
/help         this text
/quit         leave; so does Ctrl-D
Ctrl-C cancels an answer."""
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(slots=True)
class Reply:
    """One answer as it comes in; times by the chat's clock, in seconds."""

    begun: float
    first: float | None = None
    last: float = 0.0
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    regrow: dict[str, Any] = field(default_factory=dict)


class Chat:
    """A conversation with one model of one server; `async with` opens and closes the connection."""

    def __init__(
        self,
        url: str,
        system: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        key: str | None = None,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.model = ""
        self._server = Server(url, key)
        self._console = console
        self._clock = clock
        self.restart(system)

    def restart(self, system: str | None = None) -> None:
        """Forget the conversation; keep the system prompt unless a new one is given."""
        if system is None:
            self.messages = [message for message in self.messages if message["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": system}] if system else []

    async def connect(self) -> None:
        """Learn the model's name; raises Unanswered."""
        model = await self._server.model()
        self.model = model["id"]
        if "chat" not in model.get("capabilities", ["chat"]):
            raise Unanswered(f"{self.model} has no chat template; use {self._server.url}/v1/completions")

    async def say(self, text: str) -> None:
        """Send a message and print the answer as it comes; raises Unanswered.

        What was answered stays in the conversation, also where it was cut off.
        """
        self.messages.append({"role": "user", "content": text})
        reply = Reply(begun=self._clock())
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "regrow": {"progress": True},
        }
        try:
            with self._console.status("sent") as status:
                async with self._server.answered("POST", "/v1/chat/completions", body) as response:
                    async for chunk in chunks_of(response):
                        self._take(chunk, reply, status)
        finally:
            if reply.text:
                self._console.print()
                self.messages.append({"role": "assistant", "content": "".join(reply.text)})
            else:
                self.messages.pop()
        for line in facts(reply):
            self._console.print(line, style="dim")

    def _take(self, chunk: dict[str, Any], reply: Reply, status: Status) -> None:
        if error := chunk.get("error"):
            raise Unanswered(error["message"])
        reply.usage = chunk.get("usage") or reply.usage
        about = chunk.get("regrow") or {}
        if "phase" in about:
            status.update(progress_line(about))
        elif about:
            reply.regrow = about
        for choice in chunk["choices"]:
            if choice["delta"].get("reasoning_content"):
                status.update("thinking")
            if text := choice["delta"].get("content"):
                status.stop()
                reply.last = self._clock()
                reply.first = reply.first or reply.last
                reply.text.append(text)
                self._console.print(text.translate(CONTROLS), end="", soft_wrap=True)


def progress_line(about: dict[str, Any]) -> str:
    """Return what to show of a phase before the first token."""
    match about["phase"]:
        case "queued":
            return f"queued, {about['ahead']} ahead"
        case "reading":
            left = about["eta_ms"] / 1e3
            return f"reading {about['position']:,} of {about['total']:,} tokens, {left:.0f} s left"
        case phase:
            return str(phase)


def facts(reply: Reply) -> list[str]:
    """Return what to say below an answer: what was reused and read, how fast it came, and why not more."""
    regrow, usage = reply.regrow, reply.usage
    if not regrow or not usage:
        return []
    parts = [f"reused {regrow['reused']:,} ({regrow['source']})", f"read {regrow['read']:,}"]
    if reply.first is not None:
        parts.append(f"first token {reply.first - reply.begun:.2f} s")
        drawn = usage["completion_tokens"]
        if drawn > 1 and reply.last > reply.first:
            parts.append(f"{(drawn - 1) / (reply.last - reply.first):.1f} tokens/s")
    why = regrow.get("why")
    return [" · ".join(parts), *([f"why: {why}"] if why else [])]


def chat(url: str, system: str, key: str | None = None) -> int:
    """Run the chat until the input ends; returns the exit status."""
    console = Console(highlight=False, markup=False)
    talk = Chat(url, system, console, key=key)
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history)
    with asyncio.Runner() as runner:
        try:
            runner.run(talk.connect())
        except Unreachable as error:
            raise Unreachable(f"{error} (regrow serve starts a server, --url says where it is)") from None
        console.print(f"{talk.model} at {url}. /help says what you can do.", style="dim")
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                console.print(end="\n" if prompt else "")
                return 0
            except KeyboardInterrupt:
                console.print()
                continue
            if line in ("/quit", "/exit"):
                return 0
            try:
                if line and not command(talk, line, console):
                    runner.run(talk.say(line))
            except KeyboardInterrupt:
                console.print("cancelled", style="dim")
            except Unanswered as error:
                console.print(f"error: {error}", style="red")


def command(talk: Chat, line: str, console: Console) -> bool:
    """Carry out a line that is a command; False where it is a message."""
    if not line.startswith("/"):
        return False
    name, _, rest = line.partition(" ")
    match name:
        case "/reset":
            talk.restart()
            console.print("A new conversation.")
        case "/system":
            talk.restart(rest.strip())
            console.print(f"A new conversation, {'with' if rest.strip() else 'without'} a system prompt.")
        case "/help":
            console.print(HELP)
        case _:
            console.print(f"there is no {name}; /help says what there is")
    return True
