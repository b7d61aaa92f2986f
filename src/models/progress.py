"""How long work tells what it is doing: `progress(text, share)`, share from 0 to 1 or None where unknown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float | None], None]


class Stopped(Exception):
    """Nobody waits for this work any more."""


@contextmanager
def stoppable(progress: Progress) -> Iterator[Progress]:
    """Give a `progress` that raises Stopped, in the thread that tells it, once the block has been left by an
    error: so work on another thread ends where it next says how far it is."""
    left = False

    def tell(text: str, share: float | None) -> None:
        if left:
            raise Stopped
        progress(text, share)

    try:
        yield tell
    except BaseException:
        left = True
        raise


def silent(text: str, share: float | None) -> None:
    """Tell nobody."""
