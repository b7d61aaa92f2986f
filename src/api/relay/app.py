"""The relay as an application: its own three routes, and everything else to the upstream."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from regrow.api.access import access
from regrow.api.guard import guard
from regrow.api.relay.counts import Counts
from regrow.api.relay.decide import Decider
from regrow.api.relay.prices import Prices
from regrow.api.relay.proxy import MAX_HEADER, Proxy
from regrow.config import RelaySettings
from regrow.policy.cold_prefix import RULES, Book, Rules
from regrow.store.clock import SteadyClock, system_clock
from regrow.store.originals import Originals
from regrow.store.touches import EVERY_S, Touches


class Relay:
    """One relay: what it knows and counts. Raises BadConfig, and OSError of the data directory."""

    def __init__(
        self, settings: RelaySettings, clock: SteadyClock | None = None, rules: Rules = RULES
    ) -> None:
        self.settings = settings
        self.clock = clock or system_clock()
        opted_in = settings.repack_cold or settings.prune
        directory = settings.data_dir if opted_in else None
        self.counts = Counts()
        self.originals = Originals(None if settings.dry_run else directory)
        self.touches = Touches(directory, self.clock, not settings.dry_run) if opted_in else None
        self.counts.conversations.set_function(lambda: len(self._book()))
        self.decider = Decider(
            self.touches,
            self.originals,
            Prices(settings.data_dir),
            self.counts,
            self.clock.now,
            repack_cold=settings.repack_cold,
            prune=settings.prune,
            dry_run=settings.dry_run,
            rules=rules,
        )

    def save(self) -> None:
        if self.touches is not None:
            self.touches.save()

    def _book(self) -> Book:
        return self.touches.book if self.touches else {}

    async def status(self, _: web.Request) -> web.Response:
        """GET /relay/status"""
        body = {
            "upstream": self.settings.upstream,
            "style": self.settings.style or "both",
            "repack_cold": self.settings.repack_cold,
            "prune": self.settings.prune,
            "dry_run": self.settings.dry_run,
            "data_dir": str(self.settings.data_dir),
            "latched": sum(bool(record.latches) for record in self._book().values()),
            **self.counts.numbers(),
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics"""
        return web.Response(body=self.counts.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def original(self, request: web.Request) -> web.Response:
        """GET /relay/original/{hash}"""
        text = await asyncio.to_thread(self.originals.get, request.match_info["hash"])
        if text is None:
            raise web.HTTPNotFound(text="no original of that name is kept")
        return web.Response(body=text.encode(errors="replace"), content_type="text/plain", charset="utf-8")


def make_app(relay: Relay) -> web.Application:
    """Return the application of a relay; it opens its connections at start and saves its book every 30 s."""
    app = web.Application(middlewares=[access, guard(relay.settings.host)])
    proxy = Proxy(relay.settings.upstream, relay.settings.style, relay.decider, relay.counts)
    app.add_routes(
        [
            web.get("/relay/status", relay.status),
            web.get("/relay/original/{hash}", relay.original),
            web.get("/metrics", relay.metrics),
            web.route("*", "/{path:.*}", proxy.handle),
        ]
    )

    async def running(_: web.Application) -> AsyncIterator[None]:
        async with proxy:
            saving = asyncio.create_task(_save_regularly(relay))
            yield
            saving.cancel()
            await asyncio.wait([saving])
        await asyncio.to_thread(relay.save)

    app.cleanup_ctx.append(running)
    return app


async def _save_regularly(relay: Relay) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        await asyncio.to_thread(relay.save)


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the runner to serve `app` with: bodies stay as they came, a client that leaves is noticed."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=30.0,
        max_line_size=MAX_HEADER,
        max_field_size=MAX_HEADER,
    )
