"""A docker daemon and the image of this tree, made once for all tests of containers that run."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import BUILD_S, Docker, docker_daemon, make_images, run, skip_where_it_cannot_run
from tests.docker.queries import DOCKER

ROOT = DOCKER.parent


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    skip_where_it_cannot_run()
    directory = tmp_path_factory.mktemp("docker")
    try:
        with docker_daemon(directory) as docker:
            tell("images of Debian's packages", lambda: make_images(docker, directory))
            yield docker
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def tree(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources, of which the image `reprise` has been built."""
    tree = tmp_path_factory.mktemp("tree")
    copy_sources(tree)
    tell("wheels", lambda: bring_wheels(tree / "docker" / "wheels"))
    build = (
        "build",
        "--file",
        str(tree / "docker" / "Dockerfile"),
        "--build-arg",
        "PIP_NO_INDEX=1",
        "--build-arg",
        "EXTRAS=redis,fleet",
        "--tag",
        "reprise",
    )
    tell("the image", lambda: docker(*build, str(tree), timeout_s=BUILD_S))
    shutil.rmtree(tree / "docker" / "wheels")
    return tree


def copy_sources(tree: Path) -> None:
    """Copy what travels to the builder, links as links, and the container files."""
    sent = [line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in (*sent, "docker", ".dockerignore"):
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.copytree(
                source, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(source, target)


def bring_wheels(directory: Path) -> None:
    """Download what the image is built of, unless it lies there."""
    if not any(directory.glob("torch-*.whl")):
        arguments = os.environ.get("PIP_ARGS", "")
        run(
            "make",
            "--no-print-directory",
            "wheels",
            f"WHEELS={directory}",
            f"PIP_ARGS={arguments}",
            "IMAGE_EXTRAS=redis,fleet",
            cwd=ROOT,
            timeout_s=BUILD_S,
        )


def tell(what: str, work: Callable[[], object]) -> None:
    began_s = time.monotonic()
    work()
    print(f"{what}: {time.monotonic() - began_s:.0f} s", file=sys.__stderr__)
