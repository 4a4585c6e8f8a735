import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from reprise.app.cli import doctor, program
from reprise.app.cli.ready_panel import panel
from reprise.app.settings.help import SECTIONS
from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import SettingsError, known_settings, parse_flags
from reprise.app.turn.sampling import SamplingDefaults
from reprise.cache.storage.extent_format import ExtentForm, SegmentSizes
from reprise.cache.storage.extent_store import ExtentStore
from reprise.model import directories
from tests.app.fakes import model_info

ROOT = Path(__file__).parents[3]


def reprise(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from reprise.app.cli.program import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, "COLUMNS": "200", **environ}
    )


def test_flags_come_with_a_space_or_an_equals_sign():
    arguments = ["--cache.mode", "recompute", "--scheduler.max-seqs=4", "--cache.ttl_s", "-1"]
    assert parse_flags(arguments) == {"cache.mode": "recompute", "scheduler.max_seqs": "4", "cache.ttl_s": "-1"}


@pytest.mark.parametrize("arguments", [["--cache.mode"], ["--cache.mode", "--cache.ttl_s", "1"], ["stray"], ["-x"]])
def test_half_flags_and_strays_are_refused(arguments):
    with pytest.raises(SettingsError):
        parse_flags(arguments)


def test_version_help_and_settings():
    runner = CliRunner()
    assert runner.invoke(program.cli, ["--version"]).output.strip() == program.version()
    assert "--model" in runner.invoke(program.cli, ["serve", "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"}).output
    listed = runner.invoke(program.cli, ["settings"], env={"COLUMNS": "200"}).output
    assert [name for name, _ in known_settings() if name not in listed] == []
    assert "attentionstore | prefix | recompute" in " ".join(listed.split())


def test_settings_are_listed_with_their_values_and_where_these_come_from(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text("[scheduler]\nmax_seqs = 3\n[cache]\nttl_s = 77\n[limits]\nkey_requests = 5\n")
    environ = {"REPRISE_CACHE__TTL_S": "88", "REPRISE_EXPERIMENT__SCORES": "true", "REPRISE_LIMITS__KEY_REQUESTS": "6"}
    arguments = ["settings", "--config", str(file), "--port", "9", "--limits.key-requests", "7", "--model", "[bold]x"]
    result = CliRunner().invoke(program.cli, arguments, env={**environ, "COLUMNS": "260"})
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: " ".join(line.split()) for line in result.output.splitlines() if line.strip()}
    assert rows["scheduler.max_seqs"].startswith(f"scheduler.max_seqs 3 file {file}; default ")
    assert rows["cache.ttl_s"].startswith("cache.ttl_s 88.0 environment; default ")
    assert rows["limits.key_requests"].startswith("limits.key_requests 7 flag; default 0")
    assert rows["server.port"].startswith("server.port 9 flag; default 8000")
    assert rows["model.source"].startswith("model.source [bold]x flag; default none")
    assert rows["cache.mode"].startswith("cache.mode attentionstore default keep KV in HBM")
    assert rows["experiment.scores"].startswith("experiment.scores true environment; default false")
    assert "experiment.window" not in rows


def test_settings_show_no_secrets(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('[server]\nadmin_keys = ["sk-admin-secret1"]\n')
    environ = {
        "REPRISE_SERVER__API_KEYS": "sk-first-secret1,sk-second-secret",
        "REPRISE_CACHE__REDIS_URL": "redis://me:pw-secret@one:6379/0?password=secret,rediss://:se/cret@two:6379",
        "REPRISE_FLEET__REDIS_URL": "redis://:comma,secret1@three:6379/1",
        "REPRISE_SERVER__TRACES_ENDPOINT": "https://me:secret@traces.example/v1/traces?key=secret",
    }
    result = CliRunner().invoke(program.cli, ["settings", "--config", str(file)], env={**environ, "COLUMNS": "260"})
    assert result.exit_code == 0, result.output
    for word in ("secret1", "pw-secret", "second-secret", "secret@", "=secret", "se/cret", "cret@"):
        assert word not in result.output, word
    for word in ("2, not shown", "1, not shown", "redis://one:6379/0,rediss://(not shown)", "redis://three:6379/1"):
        assert word in result.output, word
    assert "https://traces.example/v1/traces" in result.output


@pytest.mark.parametrize(
    "url",
    ["redis://one:6379,password=hidden", "redis://one/0;password=hidden", "redis://:hidden", "redis://one?pw=hidden#"],
)
def test_settings_show_no_password_of_an_address_that_redis_does_not_take(url):
    """People list their settings when the server does not start with them."""
    result = CliRunner().invoke(program.cli, ["settings"], env={"REPRISE_FLEET__REDIS_URL": url, "COLUMNS": "260"})
    assert result.exit_code == 0, result.output
    assert "hidden" not in result.output
    assert "redis://(not shown)" in result.output


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (["--cache.mode", "magic"], {}, ["cache.mode", "'prefix' or 'recompute'"]),
        (["--cache.mod", "prefix"], {}, ["cache.mod", "did you mean cache.mode"]),
        ([], {"REPRISE_SCHEDULER__MAX_SEQS": "0"}, ["scheduler.max_seqs", "environment"]),
        (["--host", "0.0.0.0"], {}, ["server.host", "server.api_keys"]),
        (["--config", "/nonexistent.toml"], {}, ["/nonexistent.toml"]),
        (["--prot", "1"], {}, ["did you mean server.port?"]),
        (["--port", "x"], {}, ["--port"]),
    ],
)
@pytest.mark.parametrize("command", ["serve", "doctor", "settings"])
def test_bad_settings_exit_with_two(command, arguments, environ, says):
    result = CliRunner().invoke(program.cli, [command, *arguments], env={"COLUMNS": "200", **environ})
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert [part for part in says if part not in output] == []


@pytest.mark.parametrize("command", [["serve", "--cache.mode", "x"], ["cache", "ls", "--cache.mode", "x"]])
def test_a_variable_that_sets_nothing_is_named(command):
    result = CliRunner().invoke(program.cli, command, env={"COLUMNS": "200", "REPRISE_PORT": "1"})
    assert "reprise: the environment variable REPRISE_PORT is no setting" in result.stderr
    assert "did you mean REPRISE_SERVER__PORT?" in result.stderr


@pytest.mark.servers
def test_a_port_in_use_is_found_before_a_model_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = reprise("serve", "--port", port, "--cache.disk_dir", str(tmp_path), "--model", "no/model")
    assert result.returncode == 1
    assert result.stderr.count(port) == 1
    assert "server.port" in result.stderr
    assert "no/model" not in result.stderr


def serve(*arguments: str) -> str:
    """Return what is said of settings with which nothing can be started."""
    result = CliRunner().invoke(program.cli, ["serve", "--port", "0", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    return result.stderr


def test_a_state_directory_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "below"):
        said = serve("--cache.disk_dir", str(directory))
        assert said == f"reprise: cache.disk_dir: {file} is a file, not a directory\n"


def test_a_model_that_is_not_there_is_said_once_and_at_once(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    (tmp_path / "model.bin").write_text("")
    state_dir = tmp_path / "state"
    for source, said in (
        (str(tmp_path / "none"), "there is no directory"),
        (str(tmp_path / "model.gguf"), "is no GGUF file"),
        (str(tmp_path / "model.bin"), "is a file"),
        (str(tmp_path), "lacks config.json, tokenizer.json, *.safetensors"),
    ):
        lines = serve("--model", source, "--cache.disk_dir", str(state_dir)).splitlines()
        assert len(lines) == 1
        assert said in lines[0]
    assert not state_dir.exists()  # nothing was started either


def test_a_gguf_file_becomes_a_directory_or_a_line_says_why_not(tmp_path):
    from tests.engine.gguf import gguf_files  # loads torch and transformers

    source = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.random_llama())
    done = CliRunner().invoke(program.cli, ["convert", str(source), str(tmp_path / "out")])
    assert done.exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert f"reprise serve --model {tmp_path / 'out'}" in done.stderr
    (tmp_path / "bad.gguf").write_bytes(source.read_bytes()[:5000])
    for file in ("bad.gguf", "none.gguf"):
        done = CliRunner().invoke(program.cli, ["convert", str(tmp_path / file), str(tmp_path / "other")])
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
        assert file in done.stderr


def test_the_demonstration_says_how_to_get_a_model_unless_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SMOLLM2", tmp_path)
    monkeypatch.setattr(directories, "SMOLLM2", tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    assert "make model" not in serve("--cache.disk_dir", str(file), "--model", "bundled")
    assert "make model" in serve("--cache.disk_dir", str(file), "--model", "")


def test_a_directory_in_use_is_found_before_a_model_is_loaded(tmp_path):
    tier = ExtentStore(
        directory=tmp_path, form=ExtentForm(b"model", SegmentSizes((64,)), b"key"), capacity_bytes=1 << 20,
        min_free_bytes=0, read_bytes_per_s=0.0, write_bytes_per_s=0.0, deadline_s=5.0,
        owner="a running server (pid 4242)",
    )  # fmt: skip
    tier.open()
    try:
        said = serve("--cache.disk_dir", str(tmp_path))
    finally:
        tier.close()
    assert f"{tmp_path} is in use by a running server (pid 4242); stop it, or choose another cache.disk_dir" in said


def test_a_number_that_is_none_is_named_with_its_option(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    for text in ("abc", "", "1,,2"):
        arguments = ["simulate", "--trace", str(trace), "--capacity-tokens", text]
        result = CliRunner().invoke(program.cli, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert f"--capacity-tokens takes whole numbers with commas between them, not '{text}'" in result.stderr


def test_the_plan_names_url_model_and_memory():
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    model = model_info(
        Path(), hbm_tokens=1 << 20, kv_bytes_per_token=2048, decouplable=False, warnings=("odd [rope]",),
        memory_plan={"weights": 3 << 30, "hbm": 2 << 30, "dram": 1 << 30, "staging": 5 << 19, "disk": 8 << 30},
    )  # fmt: skip
    sampling = SamplingDefaults(temperature=0.25, top_k=7)
    console.print(panel(Settings(), model, "http://[::1]:8000", keys=0, sampling=sampling))
    text = console.export_text()
    console.file.close()
    for part in (
        "http://[::1]:8000/v1",
        "test-model",
        "2.00 GiB",
        "1,048,576 tokens of 2,048 bytes",
        "not decoupled",
        "odd [rope]",
        "none needed",
        "temperature 0.25, top_k 7 where a request says nothing",
        "window 256: too small for most coding agents; Qwen Code sends 19,000 tokens first",
        "sessions kept 24 h",
    ):
        assert part in text
    rows = {line.strip("│ ").split("  ")[0]: line for line in text.splitlines()}
    assert "3.00 GiB" in rows["weights"]
    assert "2.5 MiB" in rows["staging"]
    assert "4,194,304 tokens" in rows["KV on disk"]
    assert "6.00 GiB" in rows["memory in all"]  # the disk is none
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    model = msgspec.structs.replace(model, device="cuda")
    console.print(panel(Settings(), model, "http://[::1]:8000", keys=0, sampling=sampling))
    console.file.close()
    in_all = next(line for line in console.export_text().splitlines() if "memory in all" in line)
    assert "1.00 GiB" in in_all  # weights and HBM are the accelerator's


def test_the_plan_says_what_packed_pages_hold_and_change():
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    packed = {"hbm_dtype": "int8", "hbm_bytes_per_token": 1088, "hbm_divergence": 0.00083}
    plan = {"hbm": 1000 * 1088, "dram": 3000 * 2048}
    model = model_info(Path(), kv_bytes_per_token=2048, memory_plan=plan, **packed)
    console.print(panel(Settings(), model, "http://[::1]:8000", keys=0, sampling=SamplingDefaults()))
    rows = {line.strip("│ ").split("  ")[0]: line for line in console.export_text().splitlines()}
    console.file.close()
    assert "1,000 tokens of 1,088 bytes (int8: 0.00083 nats a token), pages of 32" in rows["KV in HBM"]
    assert "3,000 tokens" in rows["KV in DRAM"]


def test_the_panel_says_what_is_not_used():
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    model, problem = model_info(Path()), "/var/cache does not answer (no answer within 5 s): until a restart"
    shown = panel(Settings(), model, "http://h", keys=0, sampling=SamplingDefaults(), state_problem=problem)
    console.print(shown)
    text = console.export_text()
    console.file.close()
    assert "warning" in text
    assert problem in text


def test_the_plan_counts_coded_tokens_as_they_lie():
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    plan = {"weights": 1 << 30, "hbm": 1 << 30, "dram": 1 << 30, "staging": 1 << 20, "disk": 1 << 30, "coding": 1 << 29}
    model = model_info(
        Path(),
        kv_bytes_per_token=2048,
        memory_plan=plan,
        codec="transform-1",
        lossy_codec=True,
        coded_bytes=0.25,
        dram_tokens=1_700_000,
    )
    sampling = SamplingDefaults(temperature=0.25, top_k=7)
    console.print(panel(Settings(), model, "http://[::1]:8000", keys=0, sampling=sampling))
    rows = {line.strip("│ ").split("  ")[0]: line for line in console.export_text().splitlines()}
    console.file.close()
    assert "1,700,000 tokens, most of them coded" in rows["KV in DRAM"]
    assert "2,097,152 tokens, coded" in rows["KV on disk"]  # 1 GiB / (2,048 B / 4)
    assert "524,288 tokens of" in rows["KV in HBM"]
    assert "0.50 GiB" in rows["KV being coded"]
    assert "3.50 GiB" in rows["memory in all"]


def test_help_shows_every_setting_by_section():
    output = CliRunner().invoke(program.cli, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert [name for name, _ in known_settings() if f"--{name}" not in output] == []
    titles = [output.index(f" {section}: {what}") for section, what in SECTIONS.items()]
    assert titles == sorted(titles)
    assert {name.split(".")[0] for name, _ in known_settings()} == SECTIONS.keys()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("reprise serve --cache.mo", ["--cache.mode"]),
        ("reprise serve --cache.mode ", ["attentionstore", "prefix", "recompute"]),
        ("reprise serve --cache.mode rec", ["recompute"]),
        ("reprise serve --cache.recall t", ["true"]),
        ("reprise ser", ["serve"]),
    ],
)
def test_a_shell_completes_settings_and_their_values(words, completed):
    environ = {"_REPRISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(program.cli, [], prog_name="reprise", env=environ)
    assert result.output.split() == completed


def test_completion_can_be_installed():
    assert "--install-completion" in CliRunner().invoke(program.cli, ["--help"], env={"COLUMNS": "120"}).output


@pytest.mark.servers
def test_a_server_that_is_stopped_while_it_loads_has_not_failed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--model", "bundled", "--port", str(port), "--cache.disk_dir", str(tmp_path)]
    command = [sys.executable, "-c", "from reprise.app.cli.program import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        while True:
            with contextlib.suppress(httpx.TransportError):
                status = httpx.get(f"http://127.0.0.1:{port}/health").json()["status"]
                break
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert status != "ready", "it had loaded already, so this shows nothing"
    assert (process.returncode, "failed" in said) == (0, False), said
