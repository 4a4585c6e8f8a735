"""Serves a gateway before the app with the scripted engine, as `tests.page.served` does the app alone."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise.fleet.records import Heartbeat
from tests.app.fakes import FakeEngine
from tests.fleet.gateway.harness import LOAD, Fleet, fleet
from tests.page.served import app_here, in_thread


@dataclass
class ServedFleet:
    """A gateway before one server, the replica `a`. It looks once a second at `reprise.fleet.directory`, whose beats
    may be changed from any thread."""

    url: str
    engine: FakeEngine
    fleet: Fleet

    def hear(self, name: str, *, age_s: float = 0.0, **changes: Any) -> None:
        """Let another replica beat, at whose address nobody answers."""
        known = self.fleet.directory.beats["a"][0]
        fields = {"url": "http://127.0.0.1:9", "fingerprint": known.fingerprint, "model": known.model, "load": LOAD}
        beat = Heartbeat(**{"replica": name, "boot": "1", "state": "ready", **fields, **changes})
        self.fleet.directory.beats[name] = beat, age_s


@contextlib.contextmanager
def served_fleet(directory: Path, **sections: dict[str, Any]) -> Iterator[ServedFleet]:
    """sections: settings of the gateway."""
    with in_thread(_gateway(directory, sections)) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def _gateway(directory: Path, sections: dict[str, Any]) -> AsyncIterator[ServedFleet]:
    async with app_here(directory, **sections) as app, fleet(sections) as whole:
        model = app.engine.model
        assert model is not None
        beat = Heartbeat(
            replica="a",
            boot="1",
            url=app.url,
            fingerprint=model.fingerprint,
            model=model.name,
            state="ready",
            load=LOAD,
        )
        app.live.replica = "a"
        whole.directory.beats["a"] = beat, 0.0
        await whole.refresh()
        yield ServedFleet(f"http://127.0.0.1:{whole.port}", app.engine, whole)
