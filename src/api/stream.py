"""/v1/stream: chats over one WebSocket, many at a time, in a plain protocol.

The client says {"type": "create", "id", "request": {the body of a chat}}, {"type": "cancel", "id"} and
{"type": "ping"}. The server says, each with the `id` and a `seq` that counts up from 0: queued, placed,
mounted, progress, read, delta, and at the end done or error. A cancelled request ends with done.
"""

from dataclasses import dataclass, field
from typing import cast

import msgspec
import structlog
from aiohttp import web

from regrow.actors.events import Mounted, Placed, Queued, ReadDone
from regrow.api.answer import call_id
from regrow.api.body import decoded
from regrow.api.errors import Cancelled, body_of
from regrow.api.facts import Body, Phase, facts, phase_facts
from regrow.api.intake import chat_request
from regrow.api.logprobs import chat_logprobs
from regrow.api.models import check_served
from regrow.api.port import Run
from regrow.api.runs import BrokenOff, submitted
from regrow.api.said import Ended, Said, said_by
from regrow.api.schema import ChatRequest, Fields
from regrow.api.socket import Auth, Name, Socket, open_socket
from regrow.api.state import GATE, SETTINGS
from regrow.errors import BadRequest, Overloaded
from regrow.models.deltas import CallArguments, CallStart, Content, Delta, Reasoning

AT_ONCE = 128  # requests of one connection


class Create(Fields, frozen=True, tag_field="type", tag="create"):
    id: Name
    request: msgspec.Raw


class Cancel(Fields, frozen=True, tag_field="type", tag="cancel"):
    id: Name


class Ping(Fields, frozen=True, tag_field="type", tag="ping"):
    """Answered with a pong."""


Heard = cast(type[Fields], Auth | Create | Cancel | Ping)


async def stream(request: web.Request) -> web.StreamResponse:
    """Serve one connection."""
    async with open_socket(request) as socket:
        talk = Talk(request.app, socket)
        async for message in socket.messages():
            await talk.hear(message)
    return socket.response


@dataclass(slots=True)
class Exchange:
    """One request of a connection."""

    id: str
    seq: int = 0
    run: Run | None = None
    cancelled: bool = False

    def body(self, kind: str, about: Body) -> Body:
        self.seq += 1
        return {"type": kind, "id": self.id, "seq": self.seq - 1, **about}


@dataclass(slots=True)
class Talk:
    """The requests of one connection, by the ids that the client gave them."""

    app: web.Application
    socket: Socket
    exchanges: dict[str, Exchange] = field(default_factory=dict)

    async def hear(self, data: bytes) -> None:
        """Do what the client says; what cannot be understood is answered with an error without an id."""
        try:
            heard = await decoded(data, Heard)
        except BadRequest as error:
            await self.socket.send({"type": "error", **body_of(error)})
            return
        match heard:
            case Auth():
                await self.socket.send({"type": "authorized"})
            case Ping():
                await self.socket.send({"type": "pong"})
            case Cancel(id=name):
                await self._cancel(self.exchanges.get(name))
            case Create(id=name, request=body):
                await self._create(name, bytes(body))

    async def _cancel(self, exchange: Exchange | None) -> None:
        """One that has ended already is no error: the two messages have crossed."""
        if exchange is not None:
            exchange.cancelled = True
            if exchange.run is not None:
                await exchange.run.cancel()

    async def _create(self, name: str, body: bytes) -> None:
        exchange = Exchange(name)
        refused: Exception | None = None
        if name in self.exchanges:
            refused = BadRequest("id: another request has it", param="id", code="id_in_use")
        elif len(self.exchanges) >= AT_ONCE:
            refused = Overloaded(f"{AT_ONCE} requests are running on this connection")
        if refused is not None:
            await self.socket.send(exchange.body("error", _error(refused)))
            return
        self.exchanges[name] = exchange

        async def work() -> None:
            try:
                await self._answer(exchange, body)
            finally:
                del self.exchanges[name]

        self.socket.start(work, lambda error: exchange.body("error", _error(error)))

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        settings, engine = self.app[SETTINGS], self.app[GATE].engine
        asked = await decoded(body, ChatRequest)
        check_served(asked.model, engine.info, settings)
        if (asked.n or 1) > 1:
            raise BadRequest("n: only one answer is streamed here", param="n", code="unsupported_value")
        request = chat_request(asked, engine.info, settings.message_limit)
        async with submitted(engine, request) as run:
            structlog.contextvars.bind_contextvars(request=run.id)
            exchange.run = run
            if exchange.cancelled:
                await run.cancel()
            try:
                async for event in said_by(engine, run, request, asked.parallel_tool_calls is not False):
                    for kind, about in told(event):
                        await self.socket.send(exchange.body(kind, about))
            except BrokenOff as broken:
                about = facts(broken.end)
                if isinstance(broken.error, Cancelled):
                    await self.socket.send(exchange.body("done", {"finish_reason": "cancelled", **about}))
                else:
                    await self.socket.send(exchange.body("error", {**_error(broken.error), **about}))


def told(event: Phase | Said | Ended) -> list[tuple[str, Body]]:
    """Return the messages that tell of an event: (type, what it says)."""
    match event:
        case Said():
            bodies = [body for delta in event.deltas if (body := _delta(delta))]
            if event.logprob is not None:
                first = bodies[0] if bodies else {"content": ""}
                bodies = [{**first, "logprobs": chat_logprobs([event.logprob])}, *bodies[1:]]
            return [("delta", body) for body in bodies]
        case Ended():
            return [("done", {"finish_reason": event.reason, **facts(event.end)})]
        case _:
            about = phase_facts(event)
            del about["phase"]
            return [(_kind(event), about)]


def _kind(event: Phase) -> str:
    match event:
        case Queued():
            return "queued"
        case Placed():
            return "placed"
        case Mounted():
            return "mounted"
        case ReadDone():
            return "read"
    return "progress"


def _delta(delta: Delta) -> Body | None:
    match delta:
        case Content():
            return {"content": delta.text}
        case Reasoning():
            return {"reasoning": delta.text}
        case CallStart():
            return {"tool_call": {"index": delta.index, "id": call_id(), "name": delta.name, "arguments": ""}}
        case CallArguments():
            return {"tool_call": {"index": delta.index, "arguments": delta.text}}
    return None


def _error(error: Exception) -> Body:
    return {**body_of(error)}
