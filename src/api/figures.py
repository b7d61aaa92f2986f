"""What the engine says of itself when it is asked, as Prometheus metrics: nothing of this costs anything
between two scrapes.
"""

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Figures(msgspec.Struct, frozen=True):
    """Base of the parts of an engine's status that are told; what a status lacks is 0."""


class Totals(Figures, frozen=True):
    misses: dict[str, int] = {}


class Copied(Figures, frozen=True):
    nbytes: int = 0
    seconds: float = 0.0


class Queue(Figures, frozen=True):
    waiting: int = 0
    running: int = 0
    totals: Totals = Totals()
    copied: dict[str, Copied] = {}


class Cache(Figures, frozen=True):
    budget: int = 0
    used: dict[str, int] = {}
    evictions: dict[str, int] = {}
    refusals: int = 0
    changed: int = 0
    parked: list[object] = []


class Counters(Figures, frozen=True):
    chunks: int = 0
    read_s: float = 0.0
    long_chunks: int = 0
    steps: int = 0
    step_s: float = 0.0
    pauses: int = 0
    stalls: int = 0
    longest_wait_s: float = 0.0


class Device(Figures, frozen=True):
    counters: Counters = Counters()


class Disk(Figures, frozen=True):
    state: str = "on"
    records: int = 0
    used: int = 0
    set_aside: int = 0
    written_bytes: int = 0
    written_s: float = 0.0
    restored_bytes: int = 0
    restored_s: float = 0.0
    failed: int = 0


class DiskTier(Figures, frozen=True):
    budget: int = 0
    counters: Disk = Disk()


class Mailbox(Figures, frozen=True):
    name: str
    restarts: int = 0
    waiting: int = 0


class Status(Figures, frozen=True):
    """What is told of `EnginePort.status`."""

    engine: Queue = Queue()
    cache: Cache = Cache()
    roots: list[object] = []
    device: Device = Device()
    mailboxes: list[Mailbox] = []
    disk: DiskTier | None = None


def exposition(status: object, model: str) -> bytes:
    """Return the figures of an engine's status in Prometheus's text format."""
    told = msgspec.convert(msgspec.to_builtins(status), Status)
    registry = CollectorRegistry()
    registry.register(_Told([*_load(told.engine, model), *_cache(told), *_device(told), *_disk(told.disk)]))
    return generate_latest(registry)


class _Told(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _load(queue: Queue, model: str) -> Iterator[Metric]:
    for state, number in {"running": queue.running, "waiting": queue.waiting}.items():
        about = f"Requests that are {state}"
        gauge = GaugeMetricFamily(f"vllm:num_requests_{state}", about, labels=["model_name"])
        gauge.add_metric([model], number)
        yield gauge
    yield _counter("misses", "Times that not more could be reused", "reason", queue.totals.misses)
    copied = queue.copied.items()
    nbytes = {source: lane.nbytes for source, lane in copied}
    yield _counter("copied_bytes", "Bytes copied into slots", "source", nbytes)
    seconds = {source: lane.seconds for source, lane in copied}
    yield _counter("copied_seconds", "Seconds that these copies took", "source", seconds)


def _cache(told: Status) -> Iterator[Metric]:
    cache = told.cache
    yield _gauge("cache_bytes", "Bytes that are kept", "kind", cache.used)
    yield GaugeMetricFamily("regrow_cache_budget_bytes", "Bytes that may be kept", cache.budget)
    kept = {"root": len(told.roots), "parked conversation": len(cache.parked)}
    yield _gauge("cache_entries", "System prompts and conversations that are kept", "kind", kept)
    yield _counter("evictions", "Entries that had to make room for others", "kind", cache.evictions)
    yield CounterMetricFamily("regrow_refusals", "Entries for which no room was made", cache.refusals)
    yield CounterMetricFamily("regrow_changed_copies", "Copies that had changed in memory", cache.changed)


def _device(told: Status) -> Iterator[Metric]:
    counters = told.device.counters
    work = {"chunk": counters.chunks, "step": counters.steps}
    yield _counter("device_calls", "Chunks read and steps decoded", "work", work)
    seconds = {"chunk": counters.read_s, "step": counters.step_s}
    yield _counter("device_seconds", "Seconds that these took", "work", seconds)
    about = "Chunks that took longer than --max-stall-ms"
    yield CounterMetricFamily("regrow_long_chunks", about, counters.long_chunks)
    about = "Times that running streams were stepped between the layers of a chunk"
    yield CounterMetricFamily("regrow_chunk_pauses", about, counters.pauses)
    about = "Times that running streams waited longer than --max-stall-ms for their next step"
    yield CounterMetricFamily("regrow_stalls", about, counters.stalls)
    about = "The longest that running streams waited for a step"
    yield GaugeMetricFamily("regrow_longest_wait_seconds", about, counters.longest_wait_s)
    restarts = {box.name: box.restarts for box in told.mailboxes}
    yield _counter("actor_restarts", "Times an actor was started afresh", "actor", restarts)
    waiting = {box.name: box.waiting for box in told.mailboxes}
    yield _gauge("actor_mailbox", "Messages that wait for an actor", "actor", waiting)


def _disk(tier: DiskTier | None) -> Iterator[Metric]:
    """The disk tier, where there is one."""
    if tier is None:
        return
    disk = tier.counters
    yield GaugeMetricFamily("regrow_disk_writable", "Whether records can be written", disk.state == "on")
    yield GaugeMetricFamily("regrow_disk_used_bytes", "Bytes of the files in the cache directory", disk.used)
    yield GaugeMetricFamily("regrow_disk_budget_bytes", "Bytes that they may have", tier.budget)
    yield _gauge("disk_records", "Files", "state", {"used": disk.records, "set aside": disk.set_aside})
    nbytes = {"written": disk.written_bytes, "restored": disk.restored_bytes}
    yield _counter("disk_bytes", "Bytes of records", "way", nbytes)
    seconds = {"written": disk.written_s, "restored": disk.restored_s}
    yield _counter("disk_seconds", "Seconds that these took", "way", seconds)
    yield CounterMetricFamily("regrow_disk_failures", "Records that could not be written", disk.failed)


def _counter(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"regrow_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"regrow_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
