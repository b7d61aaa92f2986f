"""The two servers that most tests share. What a test reads begins with words of its own, so that it meets
nothing of another one in the cache."""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serving

HYBRID = ("random:qwen3_5", "--parallel", "2", "--exact", "full", "--chunk", "64", "--threads", "1")


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """A model that talks, served as it is where nothing is asked for but a shorter context."""
    with serving("demo", "--ctx", "4096", "--chunk", "256") as server:
        yield server


@pytest.fixture(scope="session")
def hybrid() -> Iterator[Server]:
    """A small model with running state, in the strictest mode."""
    with serving(*HYBRID) as server:
        yield server
