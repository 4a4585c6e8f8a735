from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings, on_loopback, write_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def engine(model_dir: Path) -> FakeEngine:
    return FakeEngine(directory=model_dir)


@pytest.fixture
async def running(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with default settings, without sockets."""
    async with in_process(engine, make_settings(tmp_path)) as running:
        yield running


@pytest.fixture
async def server(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Running]:
    """The app with default settings on a real socket."""
    async with on_loopback(engine, make_settings(tmp_path)) as running:
        yield running
