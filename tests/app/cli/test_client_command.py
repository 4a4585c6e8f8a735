import asyncio
import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from reprise.app.cli import program
from tests.app.cli.clients.test_trial import CALL
from tests.app.fakes import FakeEngine, Running, make_settings, on_loopback

KEY = "a-key-of-mine"


class Program:
    """`reprise client`, in a home of its own."""

    def __init__(self, server: Running, home: Path) -> None:
        self._url = server.base_url
        self.environment = {"HOME": str(home), "COLUMNS": "200", "CODEX_HOME": "", "REPRISE_KEY": ""}

    async def __call__(self, *arguments: str, code: int = 0, **environ: str) -> tuple[str, str]:
        command, environment = ["client", *arguments, "--url", self._url], {**self.environment, **environ}
        done = await asyncio.to_thread(CliRunner().invoke, program.cli, command, env=environment)
        assert done.exit_code == code, done.output
        return done.stdout, done.stderr


@pytest.fixture
def client(server: Running, tmp_path: Path) -> Program:
    return Program(server, tmp_path / "home")


async def test_it_prints_what_the_server_says(client: Program, server: Running, tmp_path: Path) -> None:
    text, told = await client("codex")
    config = tomllib.loads(text)
    assert config["model_providers"]["reprise"]["base_url"] == f"{server.base_url}/v1"
    assert (config["model"], config["model_context_window"]) == ("test-model", 256)
    assert f"for {tmp_path / 'home' / '.codex' / 'config.toml'}; --write puts it there" in told
    assert "window 256: too small for Codex: its first request has about 9,000 tokens; serve a model" in told
    assert not (tmp_path / "home").exists()


async def test_it_writes_keeps_a_copy_and_says_so(client: Program, tmp_path: Path) -> None:
    file = tmp_path / "home" / ".config" / "opencode" / "opencode.json"
    _, told = await client("opencode", "--write")
    assert f"{file} is made" in told
    assert "now run: opencode" in told
    _, told = await client("opencode", "--write")
    assert f"{file} says all this already" in told
    file.write_text(json.dumps({"theme": "dark", "model": "other/x"}))
    _, told = await client("opencode", "--write")
    assert f"{file} is changed; as it was before, it is {file}.before-reprise" in told
    config = json.loads(file.read_text())
    assert (config["theme"], config["model"]) == ("dark", "reprise/test-model")
    file.write_text("{ // mine\n}")
    _, told = await client("opencode", "--write", code=1)
    assert f"{file} stays as it is: it is not plain JSON" in told
    assert "--to" in told
    other = tmp_path / "other.json"
    await client("opencode", "--to", str(other))
    assert json.loads(other.read_text())["model"] == "reprise/test-model"


async def test_a_variable_of_the_client_names_its_folder(client: Program, tmp_path: Path) -> None:
    _, told = await client("codex", "--write", CODEX_HOME=str(tmp_path / "codex"))
    assert f"{tmp_path / 'codex' / 'config.toml'} is made" in told


async def test_a_client_without_a_file_is_not_written(client: Program) -> None:
    _, told = await client("gptme", "--write", code=1)
    assert "gptme has no file for this" in told


async def test_the_key_is_named_and_never_written(engine: FakeEngine, tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "state", server={"api_keys": KEY})
    async with on_loopback(engine, settings) as server:
        client = Program(server, tmp_path / "home")
        _, told = await client("codex", code=1)
        assert "the server wants a key: set REPRISE_KEY" in told
        for name in ("codex", "cline", "langchain"):
            text, told = await client(name, "--key", "MY_KEY", MY_KEY=KEY)
            assert "MY_KEY" in text
            assert KEY not in text + told


async def test_the_trial_speaks_the_clients_dialect(client: Program, server: Running) -> None:
    server.app.state.readiness.model = msgspec.structs.replace(server.app.state.readiness.model, max_context=65_536)
    server.engine.script.answer = CALL
    server.engine.script.report = {"hbm_tokens": 4000, "history_tokens": 4000}
    _, told = await client("anthropic", "--test")
    assert 'messages: a call was read: report_weather {"city": "Paris"}' in told
    assert "messages: with its result, 4,000 of " in told
    assert "too small" not in told
    server.engine.script.report = None
    _, told = await client("codex", "--test", code=1)
    assert "responses: the second request found only" in told


async def test_a_name_that_the_server_does_not_have_is_said_in_its_words(client: Program) -> None:
    _, told = await client("codex", "--model", "another", code=1)
    assert "The model 'another' does not exist; this server has 'test-model'." in told


def test_names_and_servers_that_are_not_there() -> None:
    runner, environment = CliRunner(), {"COLUMNS": "200"}
    listed = runner.invoke(program.cli, ["client"], env=environment)
    assert listed.exit_code == 0
    assert "Qwen Code" in listed.stdout
    unknown = runner.invoke(program.cli, ["client", "emacs"], env=environment)
    assert (unknown.exit_code, "emacs is no client" in unknown.stderr) == (1, True)
    nobody = runner.invoke(program.cli, ["client", "codex", "--url", "http://127.0.0.1:9"], env=environment)
    assert (nobody.exit_code, "no server answers at http://127.0.0.1:9" in nobody.stderr) == (1, True)
