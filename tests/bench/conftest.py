"""Loads the scripts of `bench/` as what they are: files beside each other, not a package."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """Return what loads a script by its name; one of them is named like a standard module."""
    sys.path.append(str(BENCH))

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return loaded
