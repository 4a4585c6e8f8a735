"""Tests the API against its own OpenAPI description, with thousands of generated requests, valid and invalid.

`make test-api` runs it, in the project's own environment with the extra `api`. REPRISE_API_REQUESTS sets the number of
requests; REPRISE_API_MODEL=bundled selects the bundled model instead of the scripted engine.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

requests = pytest.importorskip("requests")
schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.app.fakes import events, write_tokenizer  # noqa: E402

pytestmark = pytest.mark.api

NUM_REQUESTS = int(os.environ.get("REPRISE_API_REQUESTS", "2400"))
ENGINE = os.environ.get("REPRISE_API_MODEL", "scripted")
PATIENCE_S = "2"  # x-request-timeout: answers that the description lets be endless end
GROWTH = 1.10  # most growth of the server's memory over the second half of the requests
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass
class Asked:
    """The answers so far, and the ids that later requests may ask for."""

    statuses: Counter[int] = field(default_factory=Counter)
    ids: dict[str, list[str]] = field(default_factory=dict)  # path parameter -> values

    def learn(self, path: str, status: int, text: str) -> None:
        self.statuses[status] += 1
        if status == 200 and text.startswith("{"):
            body = json.loads(text)
            for parameter, kinds in IDS.items():
                if body.get("object") in kinds:
                    self.ids.setdefault(parameter, []).append(body["id"])
            if "x_cache" in body:
                self.ids.setdefault("session_id", []).append(body["x_cache"]["session_id"])
            self.ids.setdefault("item_id", []).extend(item["id"] for item in _items(body) if "id" in item)


IDS = {"response_id": ("response",), "conversation_id": ("conversation",)}


def _items(body: dict[str, Any]) -> list[dict[str, Any]]:
    items = body.get("data") if body.get("object") == "list" else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


@contextmanager
def serving(state_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    model = "bundled" if ENGINE == "bundled" else str(write_tokenizer(state_dir / "model"))
    arguments = [sys.executable, "-m", "tests.api.api_server", str(state_dir), model]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
        assert process.poll() is None, "the server is gone"
    finally:
        process.terminate()
        process.wait(20)


def operations(document: dict[str, Any]) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]


def check_events(text: str, schema: dict[str, Any], document: dict[str, Any]) -> None:
    """Every event of a stream is as its `x-event-schema` says."""
    import jsonschema_rs

    validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
    error = jsonschema_rs.validator_for({"$ref": "#/components/schemas/Error", "components": document["components"]})
    for event in events_of(text):
        assert validator.is_valid(event) or error.is_valid(event), (
            event,
            [problem.message for problem in validator.iter_errors(event)],
        )


def events_of(text: str) -> list[Any]:
    """Return the data of a stream's events, also where events have names."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return events("\n\n".join(lines))


class Prober:
    def __init__(self, url: str, document: dict[str, Any], model: str) -> None:
        self.asked = Asked()
        self._url = url
        self._document = document
        self._model = model
        self._session = requests.Session()

    def probe(self, operation: Any, count: int, number: int) -> None:
        """`count` requests of one operation, every other of them wrong somewhere."""
        strategy = st.one_of(
            operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
            operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        )

        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy, sensible=st.booleans(), pick=st.integers(0, 1 << 16))
        def run(case: Any, sensible: bool, pick: int) -> None:
            self._ask(case, sensible, pick)

        run()

    def _ask(self, case: Any, sensible: bool, pick: int) -> None:
        if sensible:  # else hardly any request would get beyond the name of the model
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = self._model
            for name in case.path_parameters or {}:
                if known := self.asked.ids.get(name):
                    case.path_parameters[name] = known[pick % len(known)]
        headers = {**(case.headers or {}), "x-request-timeout": PATIENCE_S}
        response = case.call(base_url=self._url, session=self._session, headers=headers, timeout=30)
        case.validate_response(response, checks=CHECKS, headers=headers)
        if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            described = self._document["paths"][case.operation.path][case.operation.method]
            content = described["responses"]["200"]["content"]["text/event-stream"]
            check_events(response.text, content["x-event-schema"], self._document)
        self.asked.learn(case.operation.path, response.status_code, response.text)


@pytest.mark.timeout(1800)
def test_what_the_description_allows_is_answered_as_described(tmp_path: Path):
    with serving(tmp_path) as (url, server):
        document = requests.get(f"{url}/openapi.json", timeout=10).json()
        model = requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
        prober = Prober(url, document, model)
        found = operations(document)
        weights = [4 if operation.body else 1 for operation in found]
        memory: list[int] = []
        for half in range(2):
            for operation, weight in zip(found, weights, strict=True):
                prober.probe(operation, -(-weight * NUM_REQUESTS // (2 * sum(weights))), half)
            memory.append(server.memory_info().rss)
        assert requests.get(f"{url}/ready", timeout=10).status_code == 200
    statuses = prober.asked.statuses
    print(f"\n{statuses.total()} requests: {dict(sorted(statuses.items()))}; MiB: {[rss >> 20 for rss in memory]}")
    assert statuses.total() >= NUM_REQUESTS
    assert sum(count for status, count in statuses.items() if status < 300) > statuses.total() // 20
    assert memory[1] < GROWTH * memory[0]
