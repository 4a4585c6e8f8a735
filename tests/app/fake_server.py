"""Starts a server process with the scripted engine: `python -m tests.app.fake_server STATE_DIR MODEL_DIR DRAIN_S
STEP_S`.

Prints its URL when it is ready, and at the end how it ended. Every answer is long.
"""

import sys
from pathlib import Path

from reprise.app.http.server import HttpServer
from reprise.app.main import create_app
from tests.app.fakes import FakeEngine, Script, make_settings


def main() -> None:
    state_dir, model_dir, drain_s, step_s = sys.argv[1:]
    settings = make_settings(Path(state_dir), server={"port": 0, "drain_s": float(drain_s)})
    engine = FakeEngine(directory=Path(model_dir), script=Script(answer="fox " * 40, step_s=float(step_s)))
    app = create_app(settings, engine=engine)
    server = HttpServer(app, settings, on_ready=lambda model, url: print(url, flush=True))
    server.serve_forever()
    print("forced" if server.force_exit else "drained", engine.state, flush=True)


if __name__ == "__main__":
    main()
