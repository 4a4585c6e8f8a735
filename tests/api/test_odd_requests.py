"""Tests the three dialects with generated requests that are wrong somewhere, against a real engine with a tiny model.

No request may make the server fail, and none may end its conversation: the next sane request of it is answered. `make
test` sends some hundred; `make test-api` sends REPRISE_ODD_REQUESTS, 20,000 by default, and prints the figures.
"""

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.app.main import create_app
from tests.api.odd_requests import DIALECTS, Conversation
from tests.app.fakes import make_settings, write_tokenizer
from tests.engine.models import save_tiny
from tests.fleet.engine_here import EngineHere

VOCAB = 300  # as many as the test tokenizer has
WINDOW = 2048
PATIENCE_S = 60.0
HEADERS = {"content-type": "application/json"}
IN_TIME = {"x-request-timeout": "3"}  # for mutated requests, which may ask for many tokens
TOO_LONG = ("context_length_exceeded", "maximum context length", "prompt is too long")


@dataclass
class Asked:
    """The statuses of all answers, by the kind of request, and what went wrong."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.statuses.total()


class Client:
    """A client that holds one conversation after the other."""

    def __init__(self, http: httpx.AsyncClient, asked: Asked, seed: str) -> None:
        self._http, self._asked, self._seed = http, asked, seed

    async def converse(self, number: int) -> None:
        """Hold one conversation of some twelve requests, drawn from the seed and its number alone."""
        rng = random.Random(f"{self._seed}/{number}")
        talk = Conversation(rng, DIALECTS[number % len(DIALECTS)])
        name = f"{talk.dialect} {number}"
        stored = None
        for _ in range(rng.randint(1, 3)):
            talk.grow()
            stored = await self._sane(name, talk, stored)
            for _ in range(2):
                odd = await self._send(f"{name} mutated", talk.path, talk.mutated(), may_refuse=True)
                stored = response_id(odd) or stored
            await self._send(f"{name} broken", talk.path, encoded(talk.broken()), may_refuse=False)
        await self._sane(name, talk, stored)

    async def _sane(self, name: str, talk: Conversation, stored: str | None) -> str | None:
        """Ask something sane, with the history and from what the server has stored. Returns the name of the latter."""
        answer = await self._send(f"{name} sane", talk.path, encoded(talk.sane()), may_refuse=False)
        if talk.dialect == "responses" and stored is not None:
            body = {**talk.body([talk.user()]), "previous_response_id": stored}
            await self._send(f"{name} chained", talk.path, encoded(body), may_refuse=False)
        return response_id(answer)

    async def _send(self, kind: str, path: str, data: bytes, *, may_refuse: bool) -> httpx.Response:
        headers = {**HEADERS, **IN_TIME} if may_refuse else HEADERS  # a sane one is answered on a busy machine too
        answer = await asyncio.wait_for(self._http.post(path, content=data, headers=headers), PATIENCE_S)
        self._asked.statuses[kind.split()[-1], answer.status_code] += 1
        if problem := problem_of(answer, may_refuse=may_refuse):
            self._asked.wrong.append(f"{kind}: {problem}\n{data[:3000].decode(errors='replace')}\n{answer.text[:600]}")
        return answer


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def response_id(answer: httpx.Response) -> str | None:
    """Return the id of a response that is stored."""
    if answer.status_code != 200 or not answer.text.startswith("{"):
        return None
    body = answer.json()
    is_ended = body.get("status") in ("completed", "incomplete")
    return body["id"] if body.get("object") == "response" and is_ended and body.get("store") is not False else None


def problem_of(answer: httpx.Response, *, may_refuse: bool) -> str:
    """Return what is wrong with an answer; nothing if it is as it may be."""
    status, text = answer.status_code, answer.text
    if status >= 500 or '"server_error"' in text or '"api_error"' in text:
        return f"the server failed ({status})"
    if status == 200:
        return ""
    error = answer.json().get("error", {})
    if not (isinstance(error.get("message"), str) and error["message"]):
        return "an error without words"
    if not may_refuse and not any(word in text for word in TOO_LONG):
        return f"refused ({status})"
    return ""


async def ask_many(tmp_path: Path, count: int, seed: str) -> Asked:
    """Send at least `count` requests, conversation by conversation."""
    model = write_tokenizer(save_tiny(tmp_path / "tiny", vocab_size=VOCAB, max_position_embeddings=WINDOW))
    engine = EngineHere(model, max_context=WINDOW, hbm_tokens=8 * WINDOW)
    app = create_app(make_settings(tmp_path / "state"), engine=engine)
    asked = Asked()
    async with app.router.lifespan_context(app):
        await app.state.readiness.wait_loaded()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as http:
            client, number = Client(http, asked, seed), 0
            while asked.total < count:
                await client.converse(number)
                number += 1
            assert (await http.get("/ready")).status_code == 200
    return asked


def check(asked: Asked) -> None:
    """Check what came of the requests, and print it."""
    print(f"\n{asked.total} requests: {dict(sorted(asked.statuses.items()))}; {len(asked.wrong)} wrong")
    assert not asked.wrong, "\n\n".join(asked.wrong[:5])
    answered = sum(count for (kind, status), count in asked.statuses.items() if kind == "mutated" and status == 200)
    refused = sum(count for (kind, status), count in asked.statuses.items() if kind == "mutated" and status == 400)
    assert min(answered, refused) > asked.total // 20, "both must happen, else the generator shows little"


async def test_no_odd_request_makes_the_server_fail_or_ends_a_conversation(tmp_path: Path) -> None:
    check(await ask_many(tmp_path, 300, seed="few"))


@pytest.mark.api
@pytest.mark.timeout(3600)
async def test_no_odd_request_of_thousands_makes_the_server_fail(tmp_path: Path) -> None:
    count, seed = int(os.environ.get("REPRISE_ODD_REQUESTS", "20000")), os.environ.get("REPRISE_ODD_SEED", "many")
    check(await ask_many(tmp_path, count, seed))
