"""Runs every file of examples/ as its reader would, against one server with the bundled model."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.harness.servers import ROOT, ServerProcess, serve

pytestmark = pytest.mark.servers

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = {"model.dtype": "float32", "cache.hbm_tokens": 4096, "cache.dram_gib": 0.25, "engine.threads": 1}
    with serve("examples", settings) as running:
        yield running


def run(server: ServerProcess, name: str, typed: str = "") -> str:
    """Return what the example prints."""
    program = ["bash"] if name.endswith(".sh") else [sys.executable]
    done = subprocess.run(
        [*program, str(EXAMPLES / name)],
        env={**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"},
        input=typed, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\b\d+\b", line)]


def test_a_chat_says_what_came_from_the_cache(server: ServerProcess) -> None:
    printed = run(server, "chat.py", "Hello! Do you like music?\nWhat kind of music do you like?\n")
    turns = re.findall(r"\((\d+) of (\d+) prompt tokens from the cache\)", printed)
    (_, first_prompt), (second_cached, second_prompt) = [(int(cached), int(prompt)) for cached, prompt in turns]
    assert first_prompt <= second_cached < second_prompt


def test_a_fork_computes_only_what_differs(server: ServerProcess) -> None:
    lines = run(server, "edit_and_fork.py").splitlines()
    rows = {line[:28].strip(): numbers(line[28:]) for line in lines}
    assert len(rows) == 7
    assert all(prompt == cached + computed for prompt, cached, computed in rows.values())
    first_prompt = rows["a first turn"][0]
    for turn in ("the next turn", "another second question"):
        assert rows[turn][1] >= first_prompt
    assert rows["the second turn once more"][2] == 1
    assert 0 < rows["the first message edited"][1] < first_prompt


def test_a_long_chat_goes_on_beyond_the_window(server: ServerProcess) -> None:
    lines = run(server, "long_chat.py").splitlines()
    turns = [numbers(line)[:4] for line in lines[2:]]
    assert [turn for turn, *_ in turns] == list(range(1, 13))
    _, tokens, dropped, _ = turns[-1]
    assert tokens - dropped <= server.max_context < tokens
    # A turn beyond the window computes its own message, as the first one did, not what is left of its history.
    own = turns[0][3]
    assert all(computed <= 1.1 * own for *_, computed in turns)


def test_agents_in_rotation_find_their_histories_again(server: ServerProcess) -> None:
    lines = run(server, "agents_in_rotation.py").splitlines()
    assert len(lines) == 12
    found: dict[str, list[int]] = {}
    for line in lines:
        hbm, dram, disk, _ = numbers(line.split("history from:")[1])
        found.setdefault(line.split()[2], []).append(hbm + dram + disk)
    assert list(found) == ["planner", "writer", "critic", "editor"]
    assert all(first < second < third for first, second, third in found.values())
    ids = {session["id"] for session in httpx.get(f"{server.url}/v1/sessions").json()["data"]}
    assert {f"letter-{name}" for name in found} <= ids


def test_x_cache_adds_up_to_the_prompt(server: ServerProcess) -> None:
    answers = re.split(r"^session ", run(server, "read_x_cache.py"), flags=re.MULTILINE)[1:]
    assert len(answers) == 2
    for answer in answers:
        (prompt,) = map(int, re.findall(r": (\d+) prompt tokens", answer))
        sources = {name: int(tokens) for tokens, name in re.findall(r"^ +(\d+) (?:from )?(\w+)", answer, re.MULTILINE)}
        computed = sources["computed"]
        assert sources["hbm"] + sources["dram"] + sources["disk"] + computed == prompt
        assert sum(tokens for reason, tokens in sources.items() if reason in ("new", "last_token")) == computed
        assert f"hbm={sources['hbm']}" in answer
        assert f"computed={computed}" in answer


def test_a_session_is_looked_at_kept_and_deleted(server: ServerProcess) -> None:
    printed = run(server, "sessions.sh")
    assert '"pinned":true' in printed
    assert '"object":"list"' in printed
    assert httpx.get(f"{server.url}/v1/sessions/holiday").status_code == 404


def test_an_example_can_be_copied_at_a_glance_and_every_one_is_run_here() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.iterdir() if path.is_file()}
    with open(__file__, encoding="utf-8") as own:
        ran = set(re.findall(r'run\(server, "([\w.]+)"', own.read()))
    assert ran == set(files)
    assert [name for name, text in files.items() if len(text.splitlines()) > 60] == []
