"""Actors that assert their own invariants."""

from typing import Protocol

from regrow.actors.runtime import Actor


class Sound(Actor, Protocol):
    """An actor that can assert its own invariants."""

    def check_integrity(self) -> None: ...


class Checked:
    """An actor whose invariants are asserted after every message (`EngineSettings.debug`): a breach crashes
    it."""

    def __init__(self, actor: Sound) -> None:
        self._actor = actor

    async def started(self) -> None:
        await self._actor.started()
        self._actor.check_integrity()

    async def handle(self, message: object) -> object:
        result = await self._actor.handle(message)
        self._actor.check_integrity()
        return result
