"""A clock for idle times: seconds on a line that never runs faster than true time while the machine is up.

The wall clock is read once, at the start; from then on the system's clock since boot counts, sleep included,
so that no setting of the wall clock makes a pause longer or shorter. Stamps of other processes of the same
boot are brought to this line exactly, by the difference of the bases; across a reboot the wall clocks of
then and now are all there is.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """boot: names the machine's run. base: the wall clock's time when `steady`, in seconds, was 0."""

    boot: str
    base: float
    steady: Callable[[], float]

    def now(self) -> float:
        return self.base + self.steady()


def system_clock() -> SteadyClock:
    """Return the clock of this machine, counting from the wall clock's time now."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else uuid.uuid4().hex
    return SteadyClock(boot, time.time() - since_boot(), since_boot)


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
