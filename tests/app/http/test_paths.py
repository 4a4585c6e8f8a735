import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.http.paths import plain_path
from tests.app.fakes import FakeEngine, Running, in_process, make_settings

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//v1/chat//completions//", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/models//data/model/", "/v1/models//data/model/"),  # a model may be called by its path
        ("/v1/sessions/chat", "/v1/sessions/chat"),
        ("/metrics/", "/metrics"),
        ("/chats", "/chats"),
        ("/page//app.js", "/page/app.js"),
    ],
)
def test_the_endpoint_that_is_meant(path, plain):
    assert plain_path(path) == plain


@given(path=st.text(alphabet="/v1modelschat.", max_size=24).map(lambda rest: f"/{rest}"))
def test_a_plain_path_is_plain_and_stays_as_it_is(path):
    plain = plain_path(path)
    assert plain.startswith("/")
    assert plain_path(plain) == plain


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/v1//chat/completions", "/chat/completions", "/v1/v1/chat/completions"]
)
async def test_a_chat_is_answered_under_every_spelling(running: Running, path):
    assert (await running.http.post(path, json=CHAT)).status_code == 200


async def test_no_spelling_gets_around_the_keys(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, server={"api_keys": "key-number-1"})) as running:
        for path in ("//v1/chat/completions", "/chat/completions/", "/v1/v1/sessions", "/page/../v1/sessions"):
            assert (await running.http.get(path)).status_code == 401
        assert (await running.http.get("/health/")).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/v1/health", "/ready", "/v1/models"])
async def test_a_client_may_look_whether_the_server_is_there(running: Running, path):
    seen, asked = await running.http.get(path), await running.http.head(path)
    assert (asked.status_code, asked.headers["content-length"]) == (200, seen.headers["content-length"])


@pytest.mark.parametrize(
    ("path", "allowed"), [("/health", "GET, HEAD, OPTIONS"), ("/v1/chat/completions", "OPTIONS, POST")]
)
async def test_a_client_may_ask_for_the_methods(running: Running, path, allowed):
    asked = await running.http.options(path)
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, allowed, b"")
    assert (await running.http.options("/v1/nothing")).status_code == 404
    assert (await running.http.put(path)).status_code == 405


async def test_what_is_refused_is_not_among_what_is_allowed(running: Running):
    asks = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
    for path, allowed in (("/v1/chat/completions", "POST"), ("/health", "GET, HEAD")):
        refused = await running.http.options(path, headers=asks)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
