"""Tests that have a long form: `TEST_LONG=1 pytest tests/...` runs that."""

import os


def many(short: int, *, long: int) -> int:
    """Return how often to do something."""
    return long if os.environ.get("TEST_LONG") else short
