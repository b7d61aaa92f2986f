"""Copies on streams of their own, beside the steps: the compute stream waits for none of them.

Each lane has a stream and a thread. What goes between device and host is gathered by one kernel into a
packed buffer on the device and moved from there by a copy engine; the thread moves it on between the lane's
page-locked buffers and ordinary host memory. So what is kept weighs its own bytes and no more, what comes
from disk takes the same way, and page-locked memory is reserved once: two buffers a lane, counted in `held`.

A copy follows the steps that were given before it. It has ended when the thread has seen it end; a slot is
used only then (`transfers.py`), so no step ever waits. The state of a snapshot is gathered on the compute
stream itself, as the next chunk overwrites it, and goes to the host on a lane that no long park holds up.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import cycle
from typing import Generic, TypeVar

import torch

from regrow.gpu.copies import as_cells, host_like, pieces
from regrow.gpu.kernels.spans import Pair
from regrow.gpu.streams import Event, Lane, Streams
from regrow.gpu.types import Snapshot

T = TypeVar("T")
BUFFER_BYTES = 16 * 1024 * 1024  # a power of two: torch page-locks nothing else
ALIGNED = 16  # so that the kernel moves words of 16 bytes
LOOK_S = 1e-3
COPYING: tuple[Lane, ...] = ("mount", "park", "restore", "snapshot")
BUFFERED: tuple[Lane, ...] = ("park", "restore", "snapshot")
FLYING = 2  # while one buffer is on the bus, the thread fills or empties the other


class LaneCopy(Generic[T]):
    """A copy that goes on by itself; implements `CellCopy`."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    @property
    def ended(self) -> bool:
        return self._future.done()

    def advance(self, seconds: float) -> bool:
        if math.isinf(seconds) and not self.ended:
            wait((self._future,), timeout=LOOK_S)
        if self.ended:
            self._future.result()
        return self.ended


class LaneState(LaneCopy[Snapshot | None]):
    """A state on its way to host memory; implements `StateCopy`."""

    @property
    def snapshot(self) -> Snapshot | None:
        return self._future.result()


class StreamLanes:
    """Implements `Lanes`. workers: the thread of each lane. buffer_bytes: of a page-locked buffer."""

    def __init__(
        self, streams: Streams, workers: Mapping[Lane, Executor], buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self._streams, self._workers = streams, workers
        self.held = len(BUFFERED) * FLYING * buffer_bytes
        self._buffers = {lane: [streams.pinned(buffer_bytes) for _ in range(FLYING)] for lane in BUFFERED}
        self._packed = {lane: streams.scratch(lane, buffer_bytes) for lane in BUFFERED}

    def mount(self, pairs: Iterable[Pair], *, anew: bool) -> LaneCopy[None]:
        self._follow("mount")
        self._streams.launch("mount", list(pairs))
        return LaneCopy(self._workers["mount"].submit(self._streams.mark("mount").wait))

    def restore(self, pairs: Iterable[Pair], *, anew: bool) -> LaneCopy[None]:
        return self._begin("restore", partial(self._to_device, list(pairs)))

    def park(self, cells: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], LaneCopy[None]]:
        host = host_like(cells)
        return host, self._begin("park", partial(self._to_host, "park", list(zip(host, cells, strict=True))))

    def snapshot(self, position: int, states: Sequence[torch.Tensor]) -> LaneState:
        kept = carve(self._streams.scratch("compute", packed_bytes(states)), states)
        self._streams.launch("compute", list(zip(kept, states, strict=True)))
        self._follow("snapshot")
        host = host_like(states)

        def take() -> Snapshot | None:
            with torch.inference_mode():
                whole = self._streams.finite("snapshot", kept)
                self._to_host("snapshot", list(zip(as_cells(host), as_cells(kept), strict=True)))
                return Snapshot(position, host) if whole else None

        return LaneState(self._workers["snapshot"].submit(take))

    def _follow(self, lane: Lane) -> None:
        self._streams.follow(lane, self._streams.mark("compute"))

    def _begin(self, lane: Lane, work: Callable[[], None]) -> LaneCopy[None]:
        self._follow(lane)

        def run() -> None:
            with torch.inference_mode():
                work()

        return LaneCopy(self._workers[lane].submit(run))

    def _to_host(self, lane: Lane, pairs: Iterable[Pair]) -> None:
        """Gather, move and unload one buffer after another; on the lane's thread."""
        flying: deque[Callable[[], None]] = deque()
        packed = self._packed[lane]
        for batch, buffer in zip(batches(pairs, len(packed)), cycle(self._buffers[lane]), strict=False):
            if len(flying) == FLYING:
                flying.popleft()()
            targets, sources = zip(*batch, strict=True)
            nbytes = packed_bytes(sources)
            self._streams.launch(lane, list(zip(carve(packed, sources), sources, strict=True)))
            self._streams.move(lane, buffer[:nbytes], packed[:nbytes])
            flying.append(partial(_unload, self._streams.mark(lane), buffer, targets))
        for land in flying:
            land()

    def _to_device(self, pairs: Iterable[Pair]) -> None:
        """Load, move and scatter one buffer after another; on the lane's thread."""
        lane: Lane = "restore"
        flying: deque[Event] = deque()
        packed = self._packed[lane]
        for batch, buffer in zip(batches(pairs, len(packed)), cycle(self._buffers[lane]), strict=False):
            if len(flying) == FLYING:
                flying.popleft().wait()
            targets, sources = zip(*batch, strict=True)
            nbytes = packed_bytes(sources)
            for loaded, source in zip(carve(buffer, sources), sources, strict=True):
                loaded.copy_(source)
            self._streams.move(lane, packed[:nbytes], buffer[:nbytes])
            self._streams.launch(lane, list(zip(targets, carve(packed, sources), strict=True)))
            flying.append(self._streams.mark(lane))
        for moved in flying:
            moved.wait()


def cuda_workers() -> dict[Lane, Executor]:
    """Return a thread for each lane."""
    return {lane: ThreadPoolExecutor(max_workers=1, thread_name_prefix=lane) for lane in COPYING}


def batches(pairs: Iterable[Pair], limit: int) -> Iterator[list[Pair]]:
    """Cut pairs into pieces, and join these to batches that fit into `limit` bytes when packed."""
    batch: list[Pair] = []
    left = limit
    for piece in pieces(pairs, limit):
        size = packed_bytes(piece[:1])
        if batch and size > left:
            yield batch
            batch, left = [], limit
        batch.append(piece)
        left -= size
    if batch:
        yield batch


def packed_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return what these take one after another, each on a multiple of 16 bytes."""
    return sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors)


def carve(block: torch.Tensor, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous views of bytes `block`, shaped as `like`, one after another."""
    views, at = [], 0
    for tensor in like:
        views.append(block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += packed_bytes([tensor])
    return views


def _unload(event: Event, buffer: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    event.wait()
    for target, moved in zip(targets, carve(buffer, targets), strict=True):
        target.copy_(moved)
