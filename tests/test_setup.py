"""Tests that the requirements of the set-up can be installed together, and that documented installations exist."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_28_x86_64"
ON_LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> list[str]:
    """Return the requirements of the program and of all its extras."""
    asked = project()
    return [*asked["dependencies"], *(text for extra in asked["optional-dependencies"].values() for text in extra)]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def ordinary_wheel(requirement: str, tmp_path: Path) -> dict:
    """The metadata of the wheel for Linux that the package index itself has, whatever else this machine's pip is
    configured to find. Skips the test where the index does not answer."""
    own = {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_TARGET", "PIP_USER"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += [
        "--only-binary",
        ":all:",
        "--platform",
        PLATFORM,
        "--target",
        str(tmp_path / "nothing"),
        "--retries",
        "0",
    ]
    done = subprocess.run(
        [*command, "--report", "-", requirement],
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no answer from the package index: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    (found,) = json.loads(done.stdout)["install"]
    return found["metadata"]


def contradictions(requirements: list[str], pins: dict[str, str]) -> list[str]:
    """Return the requirements that our versions do not satisfy."""
    wrong = []
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({**ON_LINUX, "extra": ""})
        if applies and name in pins and not requirement.specifier.contains(pins[name]):
            wrong.append(f"{requirement}, not {pins[name]}")
    return wrong


@pytest.mark.long
def test_our_versions_are_those_that_the_ordinary_wheel_of_torch_requires(tmp_path: Path) -> None:
    pins = constraints()
    metadata = ordinary_wheel(f"torch=={pins['torch']}", tmp_path)
    assert metadata["version"] == pins["torch"]
    requires = metadata["requires_dist"]
    exact = {canonicalize_name(Requirement(text).name) for text in requires if "==" in text.split(";")[0]}
    assert "triton" in exact, "its wheel for CPUs alone was found, which requires nothing to the version"
    assert contradictions(requires, pins) == []


def test_a_contradiction_is_seen() -> None:
    ours = {"triton": "3.9.0", "sympy": "1.14.0"}
    asks = [
        "triton==3.7.1; platform_system == 'Linux'",
        "sympy>=1.13",
        "nvidia-nccl-cu13==2.29.7",
        "sympy<1; extra == 'x'",
    ]
    assert contradictions(asks, ours) == ['triton==3.7.1; platform_system == "Linux", not 3.9.0']


def test_our_own_requirements_admit_our_versions() -> None:
    extras = project()["optional-dependencies"]
    assert contradictions(requirements(), constraints()) == []
    # Its build needs torch, and CUDA's compiler: whoever asks for anything else must not get it.
    with_it = [extra for extra, texts in extras.items() if any("flash" in text for text in texts)]
    assert with_it == ["flash-attn"]
    assert [Requirement(text).name for text in extras["cuda"]] == ["triton"]


def advised() -> list[tuple[str, str]]:
    """Yield (file, word) for every word after `pip install` that names something to install, in what people read."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "app").rglob("*.py")]
    return [
        (file.name, word)
        for file in files
        for command in re.findall(r"pip install ([^`\"\n:(]+)", file.read_text(encoding="utf-8"))
        for word in command.replace("-c constraints.txt", "").split()
        if not word.startswith("-")
    ]


def test_nobody_is_told_to_install_what_is_not_there() -> None:
    known = {canonicalize_name(Requirement(text).name) for text in requirements()} | {"wheel", "ninja"}
    known |= {"."} | {f"'.[{extra}]'" for extra in project()["optional-dependencies"]}
    words = advised()
    assert ("redis_store.py", "redis") in words
    assert [(file, word) for file, word in words if word not in known] == []


def test_the_lock_has_our_versions_and_all_that_is_asked_for() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    locked = {package["name"]: package["version"] for package in packages}
    pins = constraints()
    assert {name: locked.get(name) for name in pins} == pins, "run `make lock`"
    assert locked["reprise-llm"] == project()["version"], "run `make lock`"
    (ours,) = (package["metadata"]["requires-dist"] for package in packages if package["name"] == "reprise-llm")
    asked = {(canonicalize_name(r.name), str(r.specifier)) for r in map(Requirement, requirements())}
    assert {(r["name"], str(Requirement(r["name"] + r["specifier"]).specifier)) for r in ours} == asked, (
        "run `make lock`"
    )


def test_commits_are_checked_by_the_linter_that_checks_the_tree() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    wanted = [text for hook in local["hooks"] for text in hook.get("additional_dependencies", [])]
    assert "ruff" in {Requirement(text).name for text in wanted}
    assert contradictions(wanted, constraints()) == []


def test_the_changelog_tells_of_this_version_first() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", project()["version"]]
