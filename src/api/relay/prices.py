"""What a provider takes for tokens, from a TOML file that its user can edit."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path

import msgspec

from regrow.errors import BadConfig

FILE = "prices.toml"
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one response was billed for, in tokens."""

    fresh: int = 0
    read: int = 0
    written_5m: int = 0
    written_1h: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        return self.fresh + self.read + self.written_5m + self.written_1h


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry: dollars for a million tokens, the least prefix that is cached, in tokens, and for how long a
    prefix may live that is cached unasked, in seconds (0: none is)."""

    models: list[str]
    input: float
    output: float
    cache_read: float
    cache_write_5m: float = 0.0
    cache_write_1h: float = 0.0
    minimum: int = 1024
    automatic_s: float = 0.0

    def cost(self, tokens: Tokens) -> float:
        """Return dollars."""
        return (
            tokens.fresh * self.input
            + tokens.read * self.cache_read
            + tokens.written_5m * self.cache_write_5m
            + tokens.written_1h * self.cache_write_1h
            + tokens.output * self.output
        ) / MILLION

    def saved(self, removed: float, tokens: Tokens) -> float:
        """Return the dollars that `removed` tokens would have cost, billed as most of the prompt was."""
        ways = (
            (tokens.read, self.cache_read),
            (tokens.fresh, self.input),
            (tokens.written_5m, self.cache_write_5m),
            (tokens.written_1h, self.cache_write_1h),
        )
        return removed * max(ways)[1] / MILLION


class _File(msgspec.Struct, forbid_unknown_fields=True):
    price: list[Price] = []


class Prices:
    """The entries of the user's file, then those that come with the package."""

    def __init__(self, directory: Path | None = None) -> None:
        own = None if directory is None else directory / FILE
        mine = _read(own.read_bytes(), str(own)) if own is not None and own.exists() else []
        self._prices = mine + _read(files("regrow.api.relay").joinpath(FILE).read_bytes(), FILE)

    def of(self, model: str) -> Price | None:
        """Return the price of a model; None where it is not known."""
        return next((p for p in self._prices if any(fnmatchcase(model, name) for name in p.models)), None)


def _read(text: bytes, name: str) -> list[Price]:
    try:
        return msgspec.toml.decode(text, type=_File).price
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{name}: {error}") from None
