"""The ledger: every cached byte is reserved here before it exists, and the sum never exceeds the budget (B1).

It knows nothing of what the bytes hold and evicts nothing: it grants, or refuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["keys", "checkpoint", "parked", "root", "buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(slots=True)
class _Lease:
    kind: Kind
    size: int
    committed: bool = False


class Ledger:
    """Sizes in bytes. A lease is an id above `last` that is never given out twice."""

    def __init__(self, budget: int, last: int = 0) -> None:
        if budget < 0:
            raise ValueError(f"the budget cannot be {budget} bytes")
        self._budget = budget
        self._leases: dict[int, _Lease] = {}
        self._by_kind: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._used = 0
        self._peak = 0
        self._last = last

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def used(self) -> int:
        """Bytes of all leases, committed or not."""
        return self._used

    @property
    def free(self) -> int:
        return self._budget - self._used

    @property
    def peak(self) -> int:
        """The most bytes that were ever leased at once."""
        return self._peak

    @property
    def pending(self) -> int:
        """Bytes that are leased and not yet committed."""
        return sum(lease.size for lease in self._leases.values() if not lease.committed)

    @property
    def by_kind(self) -> Mapping[Kind, int]:
        return dict(self._by_kind)

    @property
    def leases(self) -> tuple[int, ...]:
        return tuple(self._leases)

    def size(self, lease: int) -> int:
        return self._open(lease).size

    def can_ever_fit(self, size: int) -> bool:
        """Say whether `size` bytes fit an empty ledger; where not, evicting is of no use."""
        return size <= self._budget

    def reserve(self, kind: Kind, size: int) -> int | None:
        """Lease `size` bytes, or return None where they do not fit now. Raises ValueError for a size that is
        not positive."""
        if size <= 0:
            raise ValueError(f"{size} bytes cannot be leased")
        if size > self.free:
            return None
        self._last += 1
        self._leases[self._last] = _Lease(kind, size)
        self._change(kind, size)
        self._peak = max(self._peak, self._used)
        return self._last

    def commit(self, lease: int, size: int | None = None) -> None:
        """Say that the leased bytes exist now, `size` of them where it turned out to be less."""
        if size is not None:
            self.shrink(lease, size)
        self._open(lease).committed = True

    def shrink(self, lease: int, size: int) -> None:
        """Give back all but `size` bytes. Raises ValueError where that is more than is leased, or nothing."""
        held = self._open(lease)
        if not 0 < size <= held.size:
            raise ValueError(f"a lease of {held.size} bytes cannot shrink to {size}")
        self._change(held.kind, size - held.size)
        held.size = size

    def release(self, lease: int) -> None:
        """Give back a lease. Raises KeyError where it was given back before."""
        held = self._open(lease)
        del self._leases[lease]
        self._change(held.kind, -held.size)

    def _open(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise KeyError(f"lease {lease} is not open")
        return self._leases[lease]

    def _change(self, kind: Kind, size: int) -> None:
        self._by_kind[kind] += size
        self._used += size
