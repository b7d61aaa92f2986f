"""A device's streams as the copy lanes use them: work is given to a lane, and done in order by and by.

`Streams` is what the lanes need of a device. The tests have one that does the work of all lanes in any order
that the events allow; `CudaStreams` is the real one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from regrow.gpu.kernels.spans import BLOCK, NAME, SOURCE, Pair, launch_of

Lane = Literal["compute", "mount", "park", "restore", "snapshot"]


class Event(Protocol):
    """A place in a lane's work."""

    def wait(self) -> None:
        """Block the calling thread until the lane has come there."""
        ...


class Streams(Protocol):
    """Every method but `finite` returns at once."""

    def mark(self, lane: Lane) -> Event:
        """Return the place after what `lane` was given so far."""
        ...

    def follow(self, lane: Lane, event: Event) -> None:
        """Let what `lane` is given from now on begin after `event`."""
        ...

    def launch(self, lane: Lane, pairs: Sequence[Pair]) -> None:
        """Copy all (target, source) on the device, in one launch."""
        ...

    def move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between the device and page-locked host memory."""
        ...

    def finite(self, lane: Lane, states: Iterable[torch.Tensor]) -> bool:
        """Say whether all numbers are finite; blocks the calling thread."""
        ...

    def scratch(self, lane: Lane, nbytes: int) -> torch.Tensor:
        """Return device memory; where it is dropped, it is used again only by `lane`."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory."""
        ...


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """One `torch.cuda.Stream` a lane; the model computes on the default stream. Compiled, not run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {"compute": torch.cuda.default_stream(device)}
        for lane in ("mount", "park", "restore", "snapshot"):
            self._streams[lane] = torch.cuda.Stream(device)
        self._kernel = _kernel()

    def mark(self, lane: Lane) -> CudaEvent:
        return CudaEvent(self._streams[lane])

    def follow(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._streams[lane].wait_event(event.event)

    def launch(self, lane: Lane, pairs: Sequence[Pair]) -> None:
        launch = launch_of(pairs)
        if not launch.tiles:
            return
        with torch.cuda.stream(self._streams[lane]):
            if self._kernel is None:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            else:
                table = launch.table.pin_memory().to(self._device, non_blocking=True)
                arguments = tuple(np.int64(word) for word in (table.data_ptr(), *launch.scalars))
                self._kernel(self._streams[lane], launch.grid, BLOCK, arguments)

    def move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._streams[lane]):
            target.copy_(source, non_blocking=True)

    def finite(self, lane: Lane, states: Iterable[torch.Tensor]) -> bool:
        with torch.cuda.stream(self._streams[lane]):
            flags = [state.isfinite().all() for state in states if state.is_floating_point()]
            return not flags or bool(torch.stack(flags).all())

    def scratch(self, lane: Lane, nbytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._streams[lane]), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _kernel() -> Callable[[torch.cuda.Stream, int, int, tuple[Any, ...]], None] | None:
    """Return what launches the copy kernel; None without CuPy (the extra `cuda`), and then torch copies
    tensor by tensor."""
    try:
        import cupy
    except ImportError:
        return None
    raw = cupy.RawKernel(SOURCE.read_text(), NAME, options=("-std=c++17",))
    raw.compile()  # now, not in the first copy beside running streams

    def launch(stream: torch.cuda.Stream, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        with cupy.cuda.Device(stream.device_index), cupy.cuda.ExternalStream(stream.cuda_stream):
            raw((grid,), (block,), arguments)

    return launch
