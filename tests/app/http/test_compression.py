"""Tests compressing lists and the page's files."""

import gzip
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.http.compression import LEAST_BYTES, LONG_BYTES, Compression, accepts_gzip
from tests.app.api.reprise.test_sessions import keep
from tests.app.fakes import Running

LONG = b'{"a": "' + b"x" * LEAST_BYTES + b'"}'


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("gzip", True), ("GZIP, deflate", True), ("deflate, gzip;q=0.5", True), ("*", True), ("br, *;q=0.1", True),
        ("gzip ; q=1", True),
        ("", False), ("identity", False), ("gzip;q=0", False), ("gzip;q=0.000", False), ("gzip;q=0, *", False),
        ("*;q=0", False), ("gzip;q=x", False), ("xgzip", False),
    ],
)  # fmt: skip
def test_what_a_client_takes(header: str, expected: bool) -> None:
    assert accepts_gzip(header) == expected


@given(header=st.text(alphabet="gzip*;q=0.1, \t", max_size=30))
def test_any_header_is_read(header: str) -> None:
    assert accepts_gzip(header) in (True, False)


async def answer(
    parts: list[bytes], *, media_type: str = "application/json", status: int = 200, accepts: str = "gzip",
    method: str = "GET", more: dict[str, str] | None = None,
) -> tuple[httpx.Headers, list[bytes]]:  # fmt: skip
    """Return the headers and the parts of a body that an app sends through the layer."""
    length = {"content-length": str(sum(map(len, parts)))}
    headers = {"content-type": media_type, **length, **(more or {})}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        for n, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": n < len(parts)})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    scope = {"type": "http", "method": method, "headers": [(b"accept-encoding", accepts.encode())]}
    await Compression(app)(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * len(parts)
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(parts) - 1) + [False]
    return httpx.Headers(sent[0]["headers"]), [message["body"] for message in sent[1:]]


@pytest.mark.parametrize("body", [LONG, LONG * (1 + LONG_BYTES // len(LONG))])
async def test_json_is_compressed(body: bytes) -> None:
    headers, (small,) = await answer([body], more={"vary": "origin"})
    assert gzip.decompress(small) == body
    assert (headers["content-encoding"], headers["content-length"]) == ("gzip", str(len(small)))
    assert headers["vary"] == "origin, accept-encoding"


async def test_the_headers_of_head_are_those_of_get() -> None:
    (seen, _), (asked, _) = await answer([LONG]), await answer([LONG], method="HEAD")
    assert seen == asked


@pytest.mark.parametrize(
    "fields",
    [
        {"media_type": "text/event-stream; charset=utf-8"}, {"media_type": "text/plain"}, {"status": 404},
        {"method": "POST"}, {"accepts": "identity"}, {"more": {"content-encoding": "gzip"}},
    ],
)  # fmt: skip
async def test_all_else_stays_as_it_is(fields: dict[str, Any]) -> None:
    headers, (body,) = await answer([LONG], **fields)
    assert body == LONG
    assert headers["content-length"] == str(len(LONG))


async def test_a_short_body_and_one_in_parts_stay_as_they_are() -> None:
    for parts in ([b"{}"], [LONG, LONG]):
        headers, sent = await answer(parts)
        assert sent == parts
        assert "content-encoding" not in headers
        assert headers["content-length"] == str(sum(map(len, parts)))
        assert headers["vary"] == "accept-encoding"


async def test_lists_are_compressed_and_answers_are_not(running: Running) -> None:
    keep(running.engine, *(f"session-{n}" for n in range(20)))
    for path in ("/v1/sessions", "/openapi.json"):
        plain = await running.http.get(path, headers={"accept-encoding": "identity"})
        small = await running.http.get(path, headers={"accept-encoding": "gzip"})
        assert small.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert small.json() == plain.json()
        assert int(small.headers["content-length"]) < len(plain.content)
    answered = await running.chat("long " * 2000, stream=False)
    assert "content-encoding" not in answered.headers
    unknown = await running.http.get(f"/v1/sessions/{'u' * 2000}")
    assert (unknown.status_code, "content-encoding" in unknown.headers) == (404, False)


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css"])
async def test_files_of_the_page_are_compressed(running: Running, path: str) -> None:
    plain = await running.http.get(path, headers={"accept-encoding": "identity"})
    small = await running.http.get(path, headers={"accept-encoding": "gzip, br"})
    assert small.content == plain.content
    assert (small.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert int(small.headers["content-length"]) < int(plain.headers["content-length"])
    assert plain.headers["vary"] == small.headers["vary"] == "accept-encoding"
    assert plain.headers["etag"] != small.headers["etag"]
    again = {"accept-encoding": "gzip", "if-none-match": small.headers["etag"]}
    assert (await running.http.get(path, headers=again)).status_code == 304
    assert (await running.http.get(path, headers={**again, "accept-encoding": "identity"})).status_code == 200
