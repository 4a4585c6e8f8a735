"""Drives the containers of one compose file for tests, and reads an answer while it comes."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.docker.daemon import Docker, run

WAIT_S = 600.0  # on a busy machine
TOKENS = 500
QUESTION = {"role": "user", "content": "Tell me the story of the old lighthouse and its keeper, slowly."}


@dataclass
class Project:
    """Containers of one compose file. name: the project's. url: where clients reach it; key: theirs."""

    docker: Docker
    name: str
    file: Path
    environ: dict[str, str]
    url: str
    key: str = ""

    def compose(self, *words: str, timeout_s: float = WAIT_S, check: bool = True) -> str:
        command = ("docker-compose", "--file", str(self.file), "--project-name", self.name, *words)
        return run(*command, environ=self.environ, timeout_s=timeout_s, check=check)

    def containers(self, service: str = "") -> list[str]:
        """Return the ids of those that run, of one service or all."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        return self.docker("ps", "--quiet", *(word for label in labels for word in ("--filter", label))).split()

    def ask(self, path: str, **options: Any) -> httpx.Response:
        key = options.pop("key", self.key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(options.pop("method", "GET"), self.url + path, headers=headers, timeout=WAIT_S, **options)


def wait_until(is_so: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.5)


class Stream(threading.Thread):
    """An answer while it comes."""

    def __init__(self, project: Project, **changes: Any) -> None:
        super().__init__(daemon=True)
        self._project = project
        self._body = {
            "model": "bundled", "messages": [QUESTION], "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
            "temperature": 0, **changes,
        }  # fmt: skip
        self.pieces: list[str] = []
        self.served_by = ""
        self.is_done = False
        self.problem: object = None

    def run(self) -> None:
        try:
            headers = {"authorization": f"Bearer {self._project.key}"}
            url = f"{self._project.url}/v1/chat/completions"
            with httpx.stream("POST", url, json=self._body, headers=headers, timeout=WAIT_S) as answer:
                if answer.status_code != 200:
                    self.problem = answer.read()
                    return
                self.served_by = answer.headers.get("x-route", "").split(";")[0].removeprefix("replica=")
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        self.problem = self.problem or event.get("error")
                        self.pieces += [choice["delta"].get("content") or "" for choice in event.get("choices", ())]
                    self.is_done |= line == "data: [DONE]"
        except httpx.HTTPError as error:
            self.problem = error

    def whole(self) -> str:
        self.join(WAIT_S)
        assert self.problem is None
        assert self.is_done
        return "".join(self.pieces)


def begun(stream: Stream) -> Stream:
    stream.start()
    return stream
