"""Refusing a model whose files are not what they should be, in one clear line."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from regrow.errors import ModelRefused


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Within the block every error but ModelRefused becomes one: "<what>: <cause>", on one line."""
    try:
        yield
    except ModelRefused:
        raise
    except Exception as error:
        lines = (line.strip() for line in str(error).splitlines())
        cause = next(filter(None, lines), "no reason given")
        raise ModelRefused(f"{what}: {cause} ({type(error).__name__})") from error


def refuse_incomplete(
    path: Path, missing: Iterable[str], wrong: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Raise ModelRefused where weights are missing, or have a wrong shape (name, found, expected)."""
    for name, found, expected in sorted(wrong):
        raise ModelRefused(
            f"{path}: {name} has the shape {tuple(found)}, its configuration says {tuple(expected)}"
        )
    if names := sorted(missing):
        raise ModelRefused(f"{path} has no weights for {len(names)} parameters, such as {names[0]}")
