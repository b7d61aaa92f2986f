"""How much memory there is, and what a slot may take of it."""

from pathlib import Path

import torch

MIB = 1024 * 1024
KEEP_FREE = 2048 * MIB


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the machine, from /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(value.split()[0]) for name, value in fields.items()}
    return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return (total, free) bytes of the device the arenas live on."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    return host_memory()


def cache_budget(total: int, available: int) -> int:
    """Return the default ledger budget (B1): a quarter of the machine's memory, at most what is free less
    2 GiB; in bytes."""
    return max(0, min(total // 4, available - KEEP_FREE))


def context_that_fits(wanted: int, bytes_per_token: int, slots: int, free: int) -> int:
    """Return how many tokens each of `slots` slots can hold in half of the free bytes, at most `wanted`.

    A multiple of 64 where it must be cut.
    """
    if not bytes_per_token:
        return wanted
    fits = free // 2 // (bytes_per_token * slots)
    return wanted if fits >= wanted else fits // 64 * 64
