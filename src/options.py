"""Command line options as data: each is one row, and comes from the command line, the environment, a TOML
file or its default, in this order.

A value is read from text by its `Kind`, whatever its source, so a wrong one is told in the same words:
where it stands, what it is, what is allowed.
"""

import argparse
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from regrow.errors import BadConfig

HELP_WIDTH = 100
SOURCES = (
    "Every option can also come from the environment (--log-level: REGROW_LOG_LEVEL, MODEL: REGROW_MODEL) or "
    'from a TOML file (--config; log-level = "debug"). The command line wins, then the environment, then the '
    "file."
)


@dataclass(frozen=True, slots=True)
class Kind:
    """How text becomes a value. read: raises ValueError for what is not allowed. allowed: in words.

    switch: the option needs no value on the command line.
    """

    metavar: str
    allowed: str
    read: Callable[[str], object]
    switch: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `field` is the name of what it sets, `default` what holds where nothing is given;
    `shown` replaces the default in the help, for one that is decided at start."""

    name: str
    field: str
    kind: Kind
    default: object
    help: str
    shown: str | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return f"REGROW_{self.name.replace('-', '_').upper()}"


def whole(low: int, high: int | None = None, *, auto: bool = False, multiple: int = 1) -> Kind:
    """A whole number in [low, high]; "auto" is None."""

    def read(text: str) -> int | None:
        if auto and text == "auto":
            return None
        number = int(text)
        if number < low or (high is not None and number > high) or number % multiple:
            raise ValueError
        return number

    span = f"of {low} or more" if high is None else f"from {low} to {high}"
    steps = f" that is a multiple of {multiple}" if multiple > 1 else ""
    return Kind("N", f"a whole number {span}{steps}{', or auto' if auto else ''}", read)


def real(low: float, high: float | None = None, *, auto: bool = False) -> Kind:
    """A number in [low, high]; "auto" is None."""

    def read(text: str) -> float | None:
        if auto and text == "auto":
            return None
        number = float(text)
        if not low <= number <= (float("inf") if high is None else high) or number == float("inf"):
            raise ValueError
        return number

    span = f"of {low:g} or more" if high is None else f"from {low:g} to {high:g}"
    return Kind("X", f"a number {span}{', or auto' if auto else ''}", read)


def one_of(*names: str, auto: bool = False) -> Kind:
    """One of a few names; with `auto`, "auto" is None."""
    known = (*names, "auto") if auto else names

    def read(text: str) -> str | None:
        if text not in known:
            raise ValueError
        return None if auto and text == "auto" else text

    return Kind("|".join(known), f"one of {', '.join(known)}", read)


def text(metavar: str) -> Kind:
    return Kind(metavar, "text", str)


def _on_off(text: str) -> bool:
    return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, map(str.strip, text.split(","))))
    if not names:
        raise ValueError
    return names


ON_OFF = Kind("on|off", "on or off", _on_off)
SWITCH = Kind("", "on or off", _on_off, switch=True)
PATH = Kind("PATH", "a path", lambda text: Path(text).expanduser())
NAMES = Kind("NAME[,NAME]", "names, separated by commas", _names)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are raised as BadConfig, and whose help fits HELP_WIDTH columns."""

    def __init__(self, prog: str, **rest: Any) -> None:
        super().__init__(prog, formatter_class=_help_format, allow_abbrev=False, **rest)
        self._mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Let positional arguments stand anywhere among the options, where there are no commands below."""
        if self._subparsers is not None or self._mixing:
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False

    def error(self, message: str) -> NoReturn:
        raise BadConfig(message)


def _help_format(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32, width=HELP_WIDTH)


def add_options(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Option]]) -> None:
    """Add the options to the help, by subject. Values stay text until `resolve` reads them."""
    parser.epilog = SOURCES
    for subject, options in groups.items():
        group = parser.add_argument_group(subject)
        for option in options:
            about = f"{option.help} (default: {_shown(option)})".replace("%", "%%")
            if option.kind.switch:
                group.add_argument(
                    option.flag, dest=option.name, action="store_const", const="on", help=about
                )
            else:
                group.add_argument(option.flag, dest=option.name, metavar=option.kind.metavar, help=about)


def _shown(option: Option) -> str:
    match option.default:
        case _ if option.shown is not None:
            return option.shown
        case None:
            return "auto"
        case bool(value):
            return "on" if value else "off"
        case float(value):
            return f"{value:g}"
        case value:
            return str(value)


def resolve(
    options: Sequence[Option],
    given: Mapping[str, str | None],
    environment: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str = "",
) -> dict[str, object]:
    """Return field -> value for every option; raises BadConfig naming where a wrong value stands."""
    values: dict[str, object] = {}
    for option in options:
        if (text := given.get(option.name)) is not None:
            place = option.flag
        elif (text := environment.get(option.variable)) is not None:
            place = option.variable
        elif option.name in file:
            text, place = _file_text(file[option.name]), f"{option.name} in {file_name}"
        else:
            values[option.field] = option.default
            continue
        try:
            values[option.field] = option.kind.read(text)
        except (ValueError, KeyError):
            raise BadConfig(f"{place}: {text!r} is not allowed; give {option.kind.allowed}") from None
    return values


def _file_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def read_file(path: Path, known: Container[str]) -> dict[str, object]:
    """Return the values of a TOML file by option name; keys may be written with dashes or underscores."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"--config: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"--config: {path} is not TOML: {error}") from None
    values = {key.replace("_", "-"): value for key, value in table.items()}
    for name in values:
        if name not in known:
            raise BadConfig(f"--config: {path}: there is no option {name!r}")
    return values
