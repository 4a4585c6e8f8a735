"""Tests the wheel where a stranger installs it: in an environment of its own, beside Hugging Face's package `kernels`,
whose name is also that of a folder of ours. `make test-wheel` runs these tests.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.harness.servers import serve
from tests.one_name import FOLDERS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KERNELS = "kernels==0.17.2"
INSTALL_S = 300.0
READY_S = 300.0  # the first start compiles kernels
SAYS_WHERE = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        print(name, importlib.import_module(name).__file__)
    except ModuleNotFoundError as error:
        print(name, "is missing" if error.name == name else error)
"""


def run(*command: str | Path, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
    """Return what a program prints. Fail the test with what it says of an error."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make test-wheel` has built, or else one built of a copy, so that no older build is in it."""
    if built := os.environ.get("WHEEL"):
        return ROOT / built
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for folder in ("reprise", *FOLDERS):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / file, tree)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, tree)
    (found,) = out.iterdir()
    return found


class Environment:
    """A virtual environment that also finds the libraries of this one, so that no torch is fetched. It does not find
    the checkout: an editable installation works by a .pth, and Python reads only those of its own environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin/python"
        run(sys.executable, "-m", "venv", "--without-pip", directory)
        (self.packages,) = directory.glob("lib/python*/site-packages")
        theirs = [path for path in sys.path if Path(path).name == "site-packages"]
        (self.packages / "others.pth").write_text("\n".join(theirs) + "\n")

    def install(self, *words: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *words)

    def where(self, *names: str, environment: dict[str, str] | None = None) -> dict[str, str]:
        """Name of a module -> the file that a program imports by it, or that it is missing."""
        said = run(self.python, "-c", SAYS_WHERE, *names, cwd="/", env=environment or outside())
        return dict(line.split(" ", 1) for line in said.splitlines())


def outside() -> dict[str, str]:
    """Return the environment of a shell that knows nothing of the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "REPRISE" not in name}


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.install("--no-deps", wheel)
    return environment


@pytest.fixture(scope="module")
def beside(alone: Environment) -> Environment:
    """The same environment with Hugging Face's `kernels`. Skips where the package index does not answer."""
    try:
        alone.install("--only-binary", ":all:", "--constraint", ROOT / "constraints.txt", "--retries", "1", KERNELS)
    except AssertionError as error:
        pytest.skip(f"no answer from the package index: {str(error).strip().splitlines()[-1]}")
    return alone


@contextmanager
def chatting(environment: Environment) -> Iterator[psutil.Process]:
    """Start the program outside of the checkout and chat with the bundled model. Yields the engine process."""
    program = environment.directory / "bin/reprise"
    sizes = {"cache.dram_gib": 0.25, "cache.disk_gib": 0.25}
    with serve("wheel", sizes, READY_S, environment={"PYTHONPATH": ""}, program=program) as server:
        body = {"model": "bundled", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens"] > 0
        assert httpx.get(server.url, timeout=10, follow_redirects=True).raise_for_status().text.startswith("<!")
        assert not Path(psutil.Process(server.pid).cwd()).is_relative_to(ROOT)
        yield server.engine


def test_the_wheel_has_one_package_and_every_file_of_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"reprise"}
    there = {name.removeprefix("reprise/") for name in names}
    sources = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert sources - there == set()
    data = ("app/page", "fleet/scripts", "model/bundled")
    files = {p.relative_to(ROOT).as_posix() for folder in data for p in (ROOT / folder).rglob("*") if p.is_file()}
    files |= {"engine/codec/calibration.txt", "model/MODEL_CARD.md"}
    assert {name for name in files if "__pycache__" not in name} - there == set()


def test_it_brings_one_name_and_serves(alone: Environment) -> None:
    assert alone.where(*FOLDERS) == dict.fromkeys(FOLDERS, "is missing")
    assert run(alone.directory / "bin/reprise", "--version", cwd="/", env=outside()).strip()
    with chatting(alone) as engine:
        assert "reprise.engine.process.loop" in engine.cmdline()


def test_it_serves_beside_the_kernels_of_hugging_face(beside: Environment) -> None:
    theirs = str(beside.packages / "kernels/__init__.py")
    found = beside.where("reprise.kernels", *FOLDERS)
    assert found.pop("reprise.kernels") == str(beside.packages / "reprise/kernels/__init__.py")
    assert found == {**dict.fromkeys(FOLDERS, "is missing"), "kernels": theirs}
    with chatting(beside) as engine:
        # What transformers imports in there.
        assert beside.where("kernels", environment=engine.environ()) == {"kernels": theirs}
