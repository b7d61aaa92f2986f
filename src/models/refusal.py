"""Turning whatever a model's files make other libraries raise into one clear line."""

from collections.abc import Iterator
from contextlib import contextmanager

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
