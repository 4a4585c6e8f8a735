"""Tests that a server in no fleet serves turns without a module of fleet/, and that its hooks change nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.app.state_dir import load_tenant_secret
from reprise.fleet.identify import SESSION_HEADER
from reprise.fleet.protocol import RELAY_HEADER, RESUME_HEADER, fleet_key, relay_token
from tests.app.fakes import FakeEngine, in_process, make_settings
from tools.import_graph import ROOT

# Serves one turn of every kind on a scripted engine, and prints the answers' statuses and the modules of fleet/.
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from tests.app.fakes import FakeEngine, in_process, make_settings, write_tokenizer

async def serve(directory, fleet):
    engine = FakeEngine(write_tokenizer(directory / "model"))
    async with in_process(engine, make_settings(directory / "state", fleet=fleet)) as running:
        running.app.state.readiness.joining = False
        say = {"role": "user", "content": "Hello"}
        turns = [
            ("/v1/chat/completions", {"messages": [say], "session_id": "s"}),
            ("/v1/chat/completions", {"messages": [say], "stream": True}),
            ("/v1/completions", {"prompt": ["Hello", "there"], "stream": True}),
            ("/v1/messages", {"messages": [say], "max_tokens": 9}),
            ("/v1/responses", {"input": "Hello", "stream": True}),
        ]
        answers = [await running.http.post(path, json={"model": "test-model", **body}) for path, body in turns]
        answers.append(await running.http.get("/metrics"))
    return [answer.status_code for answer in answers]

statuses = asyncio.run(serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
print(json.dumps({"statuses": statuses, "fleet": sorted(n for n in sys.modules if n.startswith("reprise.fleet"))}))
"""


def loaded(directory: Path, fleet: dict[str, str]) -> list[str]:
    """Return the modules of fleet/ that a fresh process has after its turns."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), json.dumps(fleet)],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["statuses"] == [200] * 6
    return list(told["fleet"])


def test_a_server_alone_serves_every_kind_of_turn_without_a_module_of_the_fleet(tmp_path):
    assert loaded(tmp_path, {}) == []


def test_a_member_loads_the_replicas_side(tmp_path):
    pytest.importorskip("redis")
    names = loaded(tmp_path, {"redis_url": f"unix://{tmp_path}/no.sock"})
    assert {"reprise.fleet.replica.replica", "reprise.fleet.replica.arrivals", "reprise.fleet.protocol"} <= set(names)
    assert not any(name.startswith(("reprise.fleet.gateway", "reprise.fleet.supervise")) for name in names)


async def test_a_server_alone_takes_the_headers_of_gateways_for_any_others(model_dir, tmp_path):
    """No gateway knows it, and a client that sends such a header gets the answer to its body."""
    async with in_process(FakeEngine(model_dir), make_settings(tmp_path)) as running:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        key = fleet_key(load_tenant_secret(running.app.state.settings.state_dir))
        path = "/v1/chat/completions"
        headers = {
            "x-request-id": "req_1",
            RELAY_HEADER: relay_token(key, path=path, request_id="req_1"),
            RESUME_HEADER: "0:forged",
            SESSION_HEADER: "of-a-gateway",
        }
        answer = await running.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        assert RELAY_HEADER not in answer.headers
        assert answer.headers["x-session-id"] != "of-a-gateway"
        assert answer.text.startswith("data: ")
        assert answer.text.endswith("data: [DONE]\n\n")
