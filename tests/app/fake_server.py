"""Starts a server process with the scripted engine: `python -m tests.app.fake_server STATE_DIR MODEL_DIR DRAIN_S
STEP_S [goes-on]`.

Prints its URL when it is ready, and at the end how it ended. Every answer is long, and goes on when the server asks the
engine to end it early if the last word says so.
"""

import sys
from pathlib import Path

from reprise.app.http.server import HttpServer
from reprise.app.main import create_app
from tests.app.fakes import FakeEngine, Script, make_settings


class GoesOn(FakeEngine):
    """An engine that does not end its answers early."""

    def finish_all(self) -> None:
        pass


def main() -> None:
    state_dir, model_dir, drain_s, step_s, *last = sys.argv[1:]
    settings = make_settings(Path(state_dir), server={"port": 0, "drain_s": float(drain_s)})
    kind = GoesOn if last == ["goes-on"] else FakeEngine
    engine = kind(directory=Path(model_dir), script=Script(answer="fox " * 40, step_s=float(step_s)))
    app = create_app(settings, engine=engine)
    server = HttpServer(app, settings, on_ready=lambda model, url: print(url, flush=True))
    server.serve_forever()
    print("forced" if server.force_exit else "drained", engine.state, flush=True)


if __name__ == "__main__":
    main()
