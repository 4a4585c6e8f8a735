"""Starts a server process for tests of its whole API: `python -m tests.api.api_server STATE_DIR MODEL_DIR|bundled`.

Prints the server's URL when it is ready. Uses the scripted engine, or a real engine with the bundled model.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from reprise.app.http.server import HttpServer
from reprise.app.main import create_app
from reprise.engine.messages import SchedulerState, Submit
from tests.app.fakes import STATS, FakeEngine, FakeStream, Script, make_settings

IDLE = SchedulerState(
    policy="car",
    front=[],
    preemptions=0,
    fair_preemptions=0,
    loads={"finished": 0, "hidden": 0, "exposed": 0},
    step_cost={"fixed": 0.001},
)


class ForgetfulEngine(FakeEngine):
    """Keeps no list of what it was asked, so that the memory of the process is the app's."""

    async def submit(self, request: Submit) -> FakeStream:
        stream = await super().submit(request)
        for told in (self.submitted, self.aborted, self.finished, self.questions):
            told.clear()
        self.streams = [other for other in self.streams if other.open]
        return stream


def main() -> None:
    state_dir, model_dir = Path(sys.argv[1]), sys.argv[2]
    # A client that hangs up late is not what is looked at here.
    sections: dict[str, Any] = {"server": {"port": 0, "drain_s": 0.0}}
    if model_dir == "bundled":
        sections |= {"cache": {"dram_gib": 0.25, "disk_gib": 0.5, "disk_min_free_gib": 0.0}, "engine": {"threads": 1}}
    settings = make_settings(state_dir, **sections)
    engine = None
    if model_dir != "bundled":
        engine = ForgetfulEngine(directory=Path(model_dir), script=Script(tokens_per_output=4))
        engine.stats = msgspec.structs.replace(STATS, scheduler=IDLE)
    server = HttpServer(create_app(settings, engine=engine), settings, on_ready=lambda _, url: print(url, flush=True))
    server.serve_forever()


if __name__ == "__main__":
    main()
