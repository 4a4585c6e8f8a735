"""Starts docker/compose.yaml with the bundled model, and does what docs/containers.md tells operators to do:
`make test-compose`."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.harness.servers import free_port
from tests.docker.daemon import Docker, run
from tests.docker.project import WAIT_S, Project, Stream, begun, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROJECT = "reprise-one"
STATE = "/var/lib/reprise"
KEYS_FILE = f"{STATE}/keys.toml"
# The window must hold a conversation that is worth a load from disk. float32: an answer is the same again.
SMALL = {
    "REPRISE_API_KEYS": "a-key-of-the-test",
    "REPRISE_MODEL__DTYPE": "float32",
    "REPRISE_CACHE__DRAM_GIB": "0.05",
    "REPRISE_CACHE__DISK_GIB": "0.2",
    # A directory of the host.
    "REPRISE_MODEL__SOURCE": "/models/bundled",
}


def up(server: Project, *words: str) -> float:
    """Return after how many seconds it took requests."""
    began_s = time.monotonic()
    server.compose("up", "--detach", *words)
    wait_until(lambda: is_ready(server), "the server")
    return time.monotonic() - began_s


def is_ready(server: Project) -> bool:
    try:
        return server.ask("/ready").status_code == 200
    except httpx.HTTPError:
        return False


def turn(server: Project, session: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a turn to the messages. Returns where its KV came from."""
    body = {"model": "bundled", "messages": messages, "max_tokens": 8, "session_id": session, "temperature": 0}
    answer = server.ask("/v1/chat/completions", method="POST", json=body)
    assert answer.status_code == 200, answer.text
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    found: dict[str, Any] = answer.json()["x_cache"]
    return found


def new_conversation() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "The lamp turned slowly over the dark water. " * 40}]


def for_docker_compose_1(directory: Path) -> Path:
    compose = yaml.safe_load((directory / "compose.yaml").read_text(encoding="utf-8"))
    del compose["name"], compose["services"]["server"]["build"]  # it is built already
    path = directory / "compose.one.yaml"
    path.write_text(yaml.safe_dump(compose, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(docker: Docker, tree: Path) -> Iterator[Project]:
    port = free_port()
    environ = {
        **docker.environ, **SMALL, "REPRISE_LISTEN": f"127.0.0.1:{port}", "REPRISE_MODELS": str(tree / "model"),
        "COMPOSE_HTTP_TIMEOUT": str(int(WAIT_S)),
    }  # fmt: skip
    path = for_docker_compose_1(tree / "docker")
    server = Project(docker, PROJECT, path, environ, f"http://127.0.0.1:{port}", SMALL["REPRISE_API_KEYS"])
    try:
        print(f"one server: ready after {up(server):.0f} s", file=sys.__stderr__)
        yield server
    finally:
        print(server.compose("logs", "--tail", "80", "--no-color", check=False)[-20_000:])
        server.compose("down", "--volumes", "--remove-orphans", check=False)


def state_of(server: Project) -> dict[str, Any]:
    names = server.docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
    (container,) = names
    found: dict[str, Any] = server.docker.inspect(container)["State"]
    return found


def test_a_model_in_a_directory_of_the_host_is_served(server: Project) -> None:
    assert server.ask("/v1/models").json()["data"][0]["id"] == "bundled"
    assert server.ask("/v1/models", key="").status_code == 401
    wait_until(lambda: state_of(server)["Health"]["Status"] == "healthy", "the health check", 60)


def test_a_container_that_is_stopped_ends_its_answers_and_finds_its_kv_again(server: Project) -> None:
    expected = begun(Stream(server)).whole()
    messages = new_conversation()
    turn(server, "stopped", messages)
    stream = begun(Stream(server))
    wait_until(lambda: len(stream.pieces) > 3 or not stream.is_alive(), "the first tokens")
    assert stream.is_alive()
    began_s = time.monotonic()
    server.compose("stop")
    print(f"one server: stopped in {time.monotonic() - began_s:.1f} s", file=sys.__stderr__)
    assert stream.whole() == expected
    state = state_of(server)
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)  # 137: killed
    print(f"one server: ready again after {up(server):.0f} s", file=sys.__stderr__)
    found = turn(server, "stopped", messages)
    assert found["disk_tokens"] > 0, found


def test_what_is_on_the_volumes_survives_down_and_can_be_brought_back_from_a_backup(
    server: Project, tmp_path: Path
) -> None:
    key = server.compose("exec", "-T", "server", "reprise", "keys", "add", "alice", "--file", KEYS_FILE).strip()
    messages = new_conversation()
    turn(server, "kept", messages)
    server.compose("down")
    volumes = server.docker("volume", "ls", "--quiet").split()
    assert {f"{PROJECT}_state", f"{PROJECT}_models"} <= set(volumes)
    backup = tmp_path / "state.tgz"
    tar(server, "-cz", stdout=backup)
    print(f"one server: a backup of {backup.stat().st_size >> 10} KiB", file=sys.__stderr__)
    server.compose("down", "--volumes")
    assert f"{PROJECT}_state" not in server.docker("volume", "ls", "--quiet").split()
    tar(server, "-xz", stdin=backup)
    server.environ["REPRISE_SERVER__KEYS_FILE"] = KEYS_FILE
    up(server)
    found = turn(server, "kept", messages)
    assert found["disk_tokens"] > 0, found
    assert server.ask("/v1/models", key=key).status_code == 200


def tar(server: Project, action: str, *, stdin: Path | None = None, stdout: Path | None = None) -> None:
    words = ("run", "-T", "--rm", "--entrypoint", "tar", "server", "-C", STATE, action)
    command = ["docker-compose", "--file", str(server.file), "--project-name", PROJECT, *words]
    command += ["."] if stdout else []
    with open(stdin or "/dev/null", "rb") as source, open(stdout or "/dev/null", "wb") as sink:
        done = subprocess.run(
            command, env=server.environ, stdin=source, stdout=sink, stderr=subprocess.PIPE, timeout=WAIT_S, check=False
        )
    assert done.returncode == 0, done.stderr


def test_redis_keeps_its_data_without_any_capability(server: Project) -> None:
    overlay = server.file.with_name("compose.redis.yaml")
    one, two = ("--file", str(server.file)), ("--file", str(overlay))
    command = ("docker-compose", *one, *two, "--project-name", PROJECT)
    run(*command, "up", "--detach", "redis", environ=server.environ, timeout_s=WAIT_S)
    (container,) = server.containers("redis")
    wait_until(lambda: server.docker.inspect(container)["State"]["Health"]["Status"] == "healthy", "Redis", 60)
    server.docker("exec", container, "redis-cli", "set", "a", "value")
    server.docker("restart", container)
    wait_until(
        lambda: "value" in server.docker("exec", container, "redis-cli", "get", "a", check=False), "its data", 60
    )
    status = server.docker("exec", container, "cat", "/proc/1/status")
    found = dict(line.split()[:2] for line in status.splitlines() if len(line.split()) > 1)
    assert (found["CapPrm:"], found["NoNewPrivs:"]) == ("0" * 16, "1")
    assert found["Uid:"] != "0"
