"""Nothing is logged here: rendering the trace of every crash that is staged takes longer than the tests."""

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

import pytest
import structlog


def drop(_: Any, __: str, ___: MutableMapping[str, Any]) -> NoReturn:
    raise structlog.DropEvent


@pytest.fixture(autouse=True, scope="package")
def quiet() -> Iterator[None]:
    structlog.configure(processors=[drop])
    yield
    structlog.reset_defaults()
