"""The WebSocket mode of /v1/responses, as the official client speaks it (`client.responses.connect()`).

Each `response.create` carries only what is new and `previous_response_id`. What was said on the connection is
kept by it, whatever `store` says, so that any earlier response can be continued, and several times. Responses
of one `stream_id` (or of none) are made one after the other, those of different ones beside each other.
"""

from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

import structlog
from aiohttp import web

from regrow.api.body import decoded
from regrow.api.errors import body_of, status_of
from regrow.api.facts import Body
from regrow.api.responses.create import turn_of
from regrow.api.responses.schema import ResponsesRequest
from regrow.api.responses.store import STORE, ResponseStore
from regrow.api.schema import Fields
from regrow.api.socket import Auth, Name, Socket, open_socket
from regrow.errors import BadRequest, Overloaded, RegrowError

AT_ONCE = 128  # responses of one connection that are asked for and not made yet
KEPT, KEPT_BYTES = 256, 64 << 20  # responses of one connection

log = structlog.get_logger(__name__)


class ResponseCreate(ResponsesRequest, frozen=True, tag_field="type", tag="response.create"):
    """A request, as it is said here. stream_id: its lane, in which responses are made one after the other."""

    stream_id: Name | None = None


class ResponseSteer(Fields, frozen=True, tag_field="type", tag="response.steer"):
    """Decoded only to be refused."""

    previous_response_id: str
    input: object = None


Heard = cast(type[Fields], ResponseCreate | ResponseSteer | Auth)


async def responses_socket(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses, upgraded."""
    async with open_socket(request) as socket:
        lanes = Lanes(request.app, socket)
        async for message in socket.messages():
            await lanes.hear(message)
    return socket.response


@dataclass(slots=True)
class Lanes:
    """The responses of one connection that are asked for, by lane; the first of each is being made."""

    app: web.Application
    socket: Socket
    waiting: dict[str | None, deque[ResponseCreate]] = field(default_factory=dict)
    kept: ResponseStore = field(default_factory=lambda: ResponseStore(KEPT, KEPT_BYTES))

    async def hear(self, data: bytes) -> None:
        """Do what the client says."""
        try:
            heard = await decoded(data, Heard)
        except BadRequest as error:
            await self.socket.send(_error(error, None))
            return
        match heard:
            case ResponseCreate():
                await self._create(heard)
            case ResponseSteer():
                await self.socket.send(_no_steering(heard))
            case Auth():
                await self.socket.send({"type": "authorized"})

    async def _create(self, asked: ResponseCreate) -> None:
        if sum(map(len, self.waiting.values())) >= AT_ONCE:
            full = Overloaded(f"{AT_ONCE} responses are asked for already")
            await self.socket.send(_error(full, asked.stream_id))
            return
        lane = self.waiting.setdefault(asked.stream_id, deque())
        lane.append(asked)
        if len(lane) == 1:
            name = asked.stream_id
            self.socket.start(lambda: self._lane(name), lambda error: _error(error, name))

    async def _lane(self, name: str | None) -> None:
        """Make the responses of a lane until none is asked for."""
        lane = self.waiting[name]
        try:
            while lane:
                try:
                    await self._answer(lane[0])
                except ConnectionResetError:
                    raise
                except Exception as error:
                    if not isinstance(error, RegrowError):
                        log.exception("answer failed")
                    await self.socket.send(_error(error, name))
                lane.popleft()
        finally:
            del self.waiting[name]

    async def _answer(self, asked: ResponseCreate) -> None:
        if asked.background:
            raise BadRequest("background: not over a WebSocket", param="background", code="unsupported_value")
        stored = self.app[STORE]
        kept_in = [self.kept] if asked.store is False else [self.kept, stored]
        turn = turn_of(self.app, asked, [self.kept, stored], kept_in)
        lane: Body = {} if asked.stream_id is None else {"stream_id": asked.stream_id}
        async with turn.taken() as run, aclosing(turn.events(run)) as events:
            async for body in events:
                await self.socket.send({**body, **lane})


def _error(error: Exception, lane: str | None) -> Body:
    about: Body = {"type": "error", "status": status_of(error), **body_of(error)}
    return about if lane is None else {**about, "stream_id": lane}


def _no_steering(steer: ResponseSteer) -> Body:
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "a response cannot be steered while it is made; cancel it, or go on from it",
    }
    about = {"input": steer.input, "previous_response_id": steer.previous_response_id}
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": about}
