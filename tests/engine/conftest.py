"""Fixtures of the engine's tests: the tiny model, transformers' own run of it, and an engine with default settings.
A test file with another model defines its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Driver
from tests.engine.models import save_tiny, tiny_model


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the tiny model."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def vanilla() -> Any:
    """Return the tiny model as transformers runs it."""
    return tiny_model()


@pytest.fixture
def driver(path: Path) -> Driver:
    """Return an engine with the tiny model."""
    return Driver(path)
