"""Learned branch points: where prompts left the known ones, so that a third one can resume there (P4)."""

from collections import OrderedDict

LIMIT = 1024


class BranchPoints:
    """The prefix hashes at which prompts branched; the least recently learned or met one is forgotten
    first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def learn(self, prefix: bytes) -> None:
        self._hashes[prefix] = None
        self._hashes.move_to_end(prefix)
        if len(self._hashes) > self._limit:
            self._hashes.popitem(last=False)

    def __contains__(self, prefix: bytes) -> bool:
        if prefix not in self._hashes:
            return False
        self._hashes.move_to_end(prefix)
        return True


def branch_point(known: int, resume: int, chunk: int) -> int | None:
    """Return the cut to remember: `known`, the deepest one shared with a known prompt, where that lies more
    than one chunk past the resume point."""
    return known if known - resume > chunk else None
