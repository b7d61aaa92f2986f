"""Coverage of policy and actors is that of their own tests: to trace all others too costs much for little."""

from pathlib import Path

import pytest

MEASURED = ("policy", "actors")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] not in MEASURED:
            item.add_marker(pytest.mark.no_cover)
