"""How long work tells what it is doing: `progress(text, share)`, share from 0 to 1 or None where unknown."""

from collections.abc import Callable

Progress = Callable[[str, float | None], None]


def silent(text: str, share: float | None) -> None:
    """Tell nobody."""
