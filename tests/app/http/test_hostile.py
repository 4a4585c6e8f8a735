"""Tests malformed and hostile requests over real sockets: each gets a 4xx in the envelope, and nothing of it is
kept."""

import asyncio
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from reprise.app.http.server import HttpServer
from reprise.app.main import create_app
from tests.app.fakes import FakeEngine, make_settings, session_info

ALPHA, BETA, ADMIN = "sk-alpha-hostile", "sk-beta-hostile", "sk-admin-hostile"
LIMITS = {
    "body_bytes": 1 << 20,
    "connections": 60,
}
CONSTANTS = {
    "bounded_server.HEADER_TIMEOUT_S": 0.5,
    "body.BODY_TIMEOUT_S": 0.3,
    "event_stream.SEND_TIMEOUT_S": 0.4,
    "body.MAX_LEVELS": 40,
    "body.MAX_NUMBERS": {"n": 8, "logprobs": 5, "top_logprobs": 5},
    "body.MAX_ITEMS": {
        **dict.fromkeys(("messages", "input", "items"), 100),
        "stop": 4,
        "stop_sequences": 4,
        "tools": 8,
    },
    "body.MAX_SCHEMA_BYTES": 2000,
    "body.MAX_SCHEMA_LEVELS": 10,
}
HEALTH_S = 1.0  # /health answers within it, whatever else is asked


@dataclass
class Victim:
    """A server in a thread of its own, and somebody who asks for its health all the time."""

    server: HttpServer
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    port: int
    tasks: int = 0  # tasks of the idle server
    descriptors: int = 0
    longest_s: float = 0.0  # longest that /health took
    over: threading.Event = field(default_factory=threading.Event)
    asking: threading.Lock = field(default_factory=threading.Lock)  # held while the health is asked for

    @property
    def service(self) -> Any:
        return self.server._service

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def watch_health(self) -> None:
        while not self.over.wait(0.02):
            with self.asking:
                start = time.monotonic()
                assert ask(self, "GET", "/health", key=None).status == 200
                self.longest_s = max(self.longest_s, time.monotonic() - start)

    def in_use(self) -> dict[str, int]:
        """The resources that requests hold."""
        return {
            "generations": len(self.service.generations),
            "places": self.service.places.taken,
            "watchers": self.server.config.app.app.state.live.watchers,
            "streams": sum(bool(stream.open) for stream in self.engine.streams),
            "connections": len(self.server.server_state.connections),
            "requests": len(self.server.server_state.tasks),
            "tasks": max(0, len(asyncio.all_tasks(self.loop)) - self.tasks),
            "descriptors": max(0, _descriptors() - self.descriptors),
        }


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CONSTANTS.items():
            patch.setattr(f"reprise.app.http.{name}", value)
        yield


@pytest.fixture(scope="module")
def victim(small_limits, model_dir, tmp_path_factory) -> Iterator[Victim]:
    keys = {"api_keys": f"{ALPHA},{BETA}", "admin_keys": ADMIN, "port": 0, "drain_s": 0}
    settings = make_settings(tmp_path_factory.mktemp("hostile"), server=keys, limits=LIMITS)
    engine = FakeEngine(directory=model_dir)
    ready = threading.Event()
    server = HttpServer(create_app(settings, engine=engine), settings, on_ready=lambda *_: ready.set())
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    victim = Victim(server, engine, loops[0], server.servers[0].sockets[0].getsockname()[1])
    for tenant in tenants(victim)[:1]:
        engine.kept[tenant, "mine"] = session_info("mine")
    for target in ("/v1/chat/completions", "/v1/responses", "/v1/conversations"):  # whose files stay open
        assert ask(victim, "POST", target, BODY_ROUTES[target]).status == 200
    eventually(lambda: victim.in_use()["connections"] == 0)
    victim.tasks, victim.descriptors = len(asyncio.all_tasks(victim.loop)), _descriptors()
    health = threading.Thread(target=victim.watch_health)
    health.start()
    yield victim
    victim.over.set()
    health.join()
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def tenants(victim: Victim) -> list[str]:
    keyring = victim.server.config.app.app.state.keyring  # type: ignore[union-attr]
    return [keyring.tenant(f"Bearer {key}") for key in (ALPHA, BETA)]


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def ask(
    victim: Victim,
    method: str,
    target: str,
    body: object = None,
    *,
    key: str | None = ALPHA,
    headers: dict[str, str | None] | None = None,
) -> Reply:
    """`body`: bytes as they are, anything else as JSON. A header of None is left out."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given: dict[str, str | None] = {"Authorization": None if key is None else f"Bearer {key}"}
    if body is not None:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    given |= headers or {}
    return send(victim, request_bytes(method, target, data, {k: v for k, v in given.items() if v is not None}))


def send(victim: Victim, data: bytes) -> Reply:
    with closing(victim.connect()) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # answered before all of it was read
            connection.sendall(data)
        return read(connection, data.split(b" ", 1)[0].decode("latin-1"))


def read(connection: socket.socket, method: str = "POST") -> Reply:
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    body = response.read()
    return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, body)


def check_envelope(reply: Reply, target: str, status: int, code: str | None = None) -> None:
    said = (reply.status, reply.body[:500])
    assert reply.status == status, said
    assert reply.headers["content-type"] == "application/json", said
    body = reply.json()
    if target.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}, said
        assert set(body["error"]) == {"message", "type", "param", "code"}, said
        if code is not None:
            assert body["error"]["code"] == code, said
    assert body["error"]["message"], said
    assert "Traceback" not in body["error"]["message"]


HELLO = [{"role": "user", "content": "Hi"}]
MODEL = {"model": "test-model"}
CHAT = {**MODEL, "messages": HELLO}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY_ROUTES = {  # every route that reads a body, with one that it takes
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/input_tokens": CHAT,
    "/v1/completions": {**MODEL, "prompt": "Hi"},
    "/v1/responses": {**MODEL, "input": "Hi"},
    "/v1/responses/input_tokens": {**MODEL, "input": "Hi"},
    "/v1/conversations": {},
    "/v1/conversations/conv_1": {},
    "/v1/conversations/conv_1/items": {"items": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "Hi"},
    "/v1/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/detokenize": {"tokens": [5]},
    "/v1/sessions/mine": {"pinned": True},
}


def method_of(target: str) -> str:
    return "PATCH" if target.startswith("/v1/sessions") else "POST"


def nested(levels: int) -> bytes:
    return b'{"metadata":' + b'{"a":' * (levels - 1) + b"1" + b"}" * levels


BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "invalid_json"),
    "half an object": (b'{"model": "te', 400, "invalid_json"),
    "an array": (b"[]", 400, "invalid_json"),
    "a word": (b'"model"', 400, "invalid_json"),
    "NaN": (b'{"temperature": NaN}', 400, "invalid_json"),
    "infinity": (b'{"temperature": -Infinity}', 400, "invalid_json"),
    "no UTF-8": (b'{"model": "\xff\xfe"}', 400, "invalid_json"),
    "a null byte": (b'{"model": "\x00"}', 400, "invalid_json"),
    "UTF-16": ('{"model": "m"}'.encode("utf-16"), 400, "invalid_json"),
    "deep": (nested(41), 400, "invalid_json"),
    "very deep": (nested(20_000), 400, "invalid_json"),
    "an endless number": (b'{"n": ' + b"9" * 9000 + b"}", 400, ""),
    "too large": (b" " * ((1 << 20) + 1), 413, "request_too_large"),
}


@pytest.mark.parametrize("target", BODY_ROUTES)
def test_what_is_no_usable_json_is_refused_everywhere(victim: Victim, target: str):
    for name, (body, status, code) in BAD_BODIES.items():
        reply = ask(victim, method_of(target), target, body)
        if name == "an endless number":  # its field is not known to every route
            assert reply.status in (200, 400, 404)
        else:
            check_envelope(reply, target, status, code)
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = ask(victim, method_of(target), target, b"{}", headers={"Content-Type": content_type})
        check_envelope(reply, target, 415, "unsupported_media_type")
    declared = {"Content-Length": "99999999999999999999"}
    check_envelope(ask(victim, method_of(target), target, b"{}", headers=declared), target, 413)
    check_envelope(ask(victim, "PUT", target, {}), target, 405, "method_not_allowed")
    check_envelope(ask(victim, method_of(target), target, {}, key=None), target, 401, "invalid_api_key")


def deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def formatted(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BIG = {"type": "object", "properties": {f"field{n}": {"type": "string"} for n in range(100)}}
CHAT_FIELDS: list[dict[str, Any]] = [
    {"model": 5}, {"model": ""}, {"model": "x" * 600}, {"model": ["test-model"]},
    {"messages": None}, {"messages": []}, {"messages": {}}, {"messages": "Hi"}, {"messages": [None]},
    {"messages": [[]]}, {"messages": ["Hi"]}, {"messages": [{}]}, {"messages": HELLO * 101},
    {"messages": [{"role": "root", "content": "x"}]}, {"messages": [{"role": 1, "content": "x"}]},
    {"messages": [{"role": "function", "name": 5, "content": "x"}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": {"text": "x"}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
    {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]},
    {"messages": [{"role": "user", "content": "x", "name": "n" * 300}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": {}}]},
    {"messages": [{"role": "user", "content": "fox " * 20_000}], "truncation": "disabled"},
    {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": "1"}, {"temperature": True}, {"temperature": 1e999},
    {"top_p": 1.5}, {"top_p": -1}, {"top_k": -2}, {"top_k": 1.5}, {"top_k": 1 << 31}, {"min_p": 2}, {"min_p": []},
    {"n": 0}, {"n": -1}, {"n": 9}, {"n": 1.5}, {"n": "2"}, {"n": 1 << 70}, {"n": True},
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1 << 40}, {"max_completion_tokens": 0}, {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 4}, {"presence_penalty": 3}, {"frequency_penalty": -3}, {"repetition_penalty": 0},
    {"seed": 1 << 64}, {"seed": 1.5}, {"seed": "x"}, {"stop": ["a"] * 5}, {"stop": [""]}, {"stop": "x" * 2000},
    {"stop": 5}, {"stop": [None]}, {"stop_token_ids": [300]}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]},
    {"stop_token_ids": [1 << 40]}, {"stop_token_ids": [1] * 129}, {"logit_bias": {"300": 1}}, {"logit_bias": {"x": 1}},
    {"logit_bias": {"-1": 1}}, {"logit_bias": {"5": 101}}, {"logit_bias": {"5": None}}, {"logit_bias": [1]},
    {"logit_bias": {"٥": 1}}, {"logprobs": 5}, {"logprobs": "yes"}, {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 6}, {"logprobs": True, "top_logprobs": -1}, {"stream": "yes"}, {"stream": 1},
    {"stream": True, "stream_options": "x"}, {"tools": {}},
    {"tools": [TOOL] * 9}, {"tools": [TOOL, TOOL]},
    {"tools": [{"type": "web_search"}], "tool_choice": "required"}, {"tools": [{"type": "custom", "custom": {}}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "function": {"name": "a\nb"}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep_schema(60)}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
    {"tool_choice": "magic", "tools": [TOOL]}, {"tool_choice": 5, "tools": [TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
    formatted(deep_schema(11)), formatted(BIG), formatted({"type": "nonsense"}), formatted("x"),
    formatted({"$ref": "#/nowhere"}), formatted({"$ref": "file:///etc/passwd"}), formatted({"pattern": "(" * 50}),
    {"response_format": "json"}, {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
    {"guided_regex": "("}, {"guided_regex": "x" * 100_000}, {"guided_choice": []}, {"guided_grammar": "start: nowhere"},
    {"guided_json": deep_schema(11)}, {"guided_json": {}, "guided_regex": "a"}, {"structured_outputs": {"json": BIG}},
    {"session_id": ""}, {"session_id": "../../etc"}, {"session_id": "a b"}, {"session_id": "x" * 129},
    {"session_id": "a\0b"}, {"session_id": 7}, {"prompt_cache_key": ""}, {"cache_salt": "x" * 257},
    {"prompt_cache_retention": "for ever"}, {"prompt_cache_options": {"ttl": "1 week"}},
    {"prompt_cache_options": {"ttl": -1}}, {"timeout": 0}, {"timeout": -1}, {"timeout": "soon"}, {"priority": 101},
    {"ttft_ms": 0}, {"ttft_ms": -1}, {"ttft_ms": "500"}, {"ttft_ms": 600_001}, {"ttft_ms": True}, {"ttft_ms": [500]},
    {"service_tier": "gold"}, {"user": "u" * 1025}, {"metadata": {"a": 1}},
    {"metadata": {str(n): "" for n in range(17)}}, {"metadata": "x"},
    {"truncation": "middle"}, {"keep_first_tokens": -1}, {"chat_template": "{{ 7 * 7 }}"},
    {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"x": "y" * 20_000}},
    {"chat_template_kwargs": {"x": 1 << 70}}, {"chat_template_kwargs": []}, {"add_generation_prompt": False},
    {"continue_final_message": True}, {"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}},
    {"modalities": ["audio"]}, {"audio": {"voice": "x"}}, {"prediction": {"type": "content"}}, {"best_of": 2},
    {"echo": True}, {"prompt_logprobs": 1}, {"documents": [{}]}, {"important": True}, {"reasoning_effort": "vast"},
    {"client_shift": "yes"}, {"ignore_eos": "no"}, {"include_stop_str_in_output": 3},
]  # fmt: skip


@pytest.mark.parametrize("fields", CHAT_FIELDS, ids=lambda fields: json.dumps(fields)[:50])
def test_a_chat_field_that_cannot_be_used_is_refused(victim: Victim, fields: dict[str, Any]):
    engine = victim.engine
    before = len(engine.submitted)
    reply = ask(victim, "POST", "/v1/chat/completions", {**CHAT, **fields})
    check_envelope(reply, "/v1/chat/completions", 400)
    assert len(engine.submitted) == before


OTHER_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", fields) for fields in (
        {"prompt": None}, {"prompt": []}, {"prompt": [[]]}, {"prompt": {}}, {"prompt": 5}, {"prompt": [1, "a"]},
        {"prompt": [300]}, {"prompt": [-1]}, {"prompt": [[5], [300]]}, {"prompt": [1.5]}, {"prompt": [True]},
        {"prompt": ["a"] * 257}, {"prompt": ["a", 1]}, {"prompt": [[5], "a"]}, {"prompt": [1 << 63]},
        {"prompt": "fox " * 20_000, "truncation": "disabled"}, {"suffix": "x"}, {"logprobs": 6}, {"logprobs": -1},
        {"logprobs": True}, {"max_tokens": 0}, {"echo": "x"}, {"echo": True, "stream": True, "logprobs": 1}, {"n": 9},
        {"prompt": ["a"] * 100, "n": 8}, {"best_of": 3}, {"stop": ["a"] * 5}, {"response_format": {"type": "text"}},
        {"ttft_ms": 0},
    )),
    *(("/v1/responses", fields) for fields in (
        {"input": None}, {"input": 5}, {"input": []}, {"input": [{"type": "frob"}]}, {"input": [None]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254/"}]}]},
        {"input": [{"role": "tool", "content": "x"}]}, {"input": [{"role": "user", "content": "x"}] * 101},
        {"input": [{"type": "function_call", "call_id": "1", "name": "a" * 257, "arguments": "{}"}]},
        {"previous_response_id": "resp_none"}, {"previous_response_id": "../x"}, {"previous_response_id": 5},
        {"conversation": "x"}, {"conversation": {"id": "conv_'; DROP TABLE responses; --"}},
        {"previous_response_id": "resp_a", "conversation": "conv_b"}, {"background": True, "stream": True},
        {"background": True, "store": False}, {"max_output_tokens": 0}, {"top_logprobs": 6}, {"tools": [TOOL]},
        {"tools": [{"type": "file_search"}], "tool_choice": "required"}, {"tool_choice": "required"},
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        {"tools": [{"type": "namespace", "name": "n" * 257, "tools": [{"type": "function", "name": "f"}]}]},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": BIG}}}, {"prompt": {"id": "x"}},
        {"truncation": "x"}, {"metadata": {"a": "x" * 600}}, {"include": ["x" * 200]}, {"temperature": 3},
        {"ttft_ms": 600_001},
    )),
    *(("/v1/messages", fields) for fields in (
        {"max_tokens": None}, {"max_tokens": 0}, {"messages": []}, {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, {"system": 5}, {"stop_sequences": [""]},
        {"system": [{"type": "image"}]}, {"stop_sequences": ["a"] * 5}, {"tools": [{"name": "f"}]}, {"top_k": -2},
        {"tools": [{"name": "f", "input_schema": deep_schema(11)}]}, {"tool_choice": {"type": "tool"}},
        {"temperature": 3}, {"metadata": {"user_id": 5}}, {"mcp_servers": [{"url": "http://169.254.169.254/"}]},
        {"session_id": "../x"}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
        {"ttft_ms": "soon"},
    )),
    *(("/tokenize", fields) for fields in (
        {"prompt": 5}, {"prompt": None}, {"messages": HELLO}, {"model": ""}, {"add_special_tokens": "x"},
        {"prompt": None, "messages": [{"role": "root", "content": "x"}]}, {"return_token_strs": 1},
        {"prompt": None, "messages": HELLO * 101}, {"prompt": None, "messages": HELLO, "tools": [TOOL] * 9},
        {"prompt": None, "messages": HELLO, "chat_template_kwargs": {"messages": []}},
    )),
    *(("/detokenize", {"tokens": tokens}) for tokens in (
        None, "x", 5, [300], [-1], [1 << 40], [1.5], ["5"], [None], [[5]], [True], {},
    )),
    *(("/v1/conversations", fields) for fields in (
        {"items": 5}, {"items": [{"type": "frob"}]}, {"items": [{"role": "user", "content": "x"}] * 101},
        {"metadata": {"a": 1}}, {"metadata": []}, {"metadata": {"k" * 65: "x"}},
    )),
    *(("/v1/conversations/conv_1/items", {"items": items}) for items in (None, [], "", [5], [{"type": "x"}])),
    *(("/v1/sessions/mine", fields) for fields in (
        {"pinned": None}, {"pinned": "yes"}, {"ttl_s": 0}, {"ttl_s": -1}, {"ttl_s": "1"}, {"ttl_s": 1e10},
        {"ttl_s": {}},
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "fields"), OTHER_FIELDS, ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40]
)
def test_a_field_that_cannot_be_used_is_refused(victim: Victim, target: str, fields: dict[str, Any]):
    before = len(victim.engine.submitted)
    check_envelope(ask(victim, method_of(target), target, {**BODY_ROUTES[target], **fields}), target, 400)
    assert len(victim.engine.submitted) == before


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v1/sessions/../../etc/passwd", 404),
        ("GET", "/v1/sessions/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/sessions/%00", 404),
        ("GET", "/v1/sessions/mine%00", 404),
        ("GET", "/v1/sessions/%ff%fe", 404),
        ("GET", "/v1/sessions/" + "x" * 5000, 404),
        ("GET", "/v1/sessions/mine%0d%0aSet-Cookie:%20a=b", 404),
        ("DELETE", "/v1/sessions/..", 404),
        ("DELETE", "/v1/sessions/", 405),
        ("POST", "/v1/sessions/none/prefetch", 404),
        ("GET", "/v1/sessions?limit=0", 400),
        ("GET", "/v1/sessions?limit=1e9", 400),
        ("GET", "/v1/sessions?limit=" + "9" * 5000, 400),
        ("GET", "/v1/sessions?after=" + "x" * 200, 400),
        ("GET", "/v1/responses/resp_%27%20OR%201=1--", 404),
        ("GET", "/v1/responses/" + "r" * 5000, 404),
        ("GET", "/v1/responses/%ed%a0%80", 404),
        ("DELETE", "/v1/responses/resp_none", 404),
        ("POST", "/v1/responses/resp_none/cancel", 404),
        ("GET", "/v1/responses/resp_none/input_items", 404),
        ("GET", "/v1/responses/resp_none/input_items?limit=-1", 400),
        ("GET", "/v1/conversations/..%2fx", 404),
        ("GET", "/v1/conversations/conv_none/items/%00", 404),
        ("DELETE", "/v1/conversations/conv_none", 404),
        ("DELETE", "/v1/conversations/conv_none/items/x", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/models/%F0%9F%A6%8A", 404),
        ("GET", "/page/..%2fsettings.py", 404),
        ("GET", "/page/%2e%2e/auth.py", 404),
        ("GET", "/page/app.js%00.png", 404),
        ("GET", "/page/../app/auth.py", 404),
        ("GET", "//v1/nowhere", 404),
        ("GET", "/v1//page/app.js", 404),
        ("GET", "/V1/MODELS", 404),
        ("GET", "/v1/chat/completions", 405),
        ("TRACE", "/v1/models", 405),
        ("DELETE", "/v1/models", 405),
        ("PATCH", "/v1/conversations/x", 405),
        ("BREW", "/health", 405),
        ("POST", "/metrics", 405),
        ("GET", "/v1/scheduler", 403),
        ("GET", "*", 404),
        ("GET", "http://169.254.169.254/latest", 404),
    ],
    ids=lambda value: str(value)[:40],
)
def test_no_path_leads_where_it_should_not(victim: Victim, method: str, target: str, status: int):
    check_envelope(ask(victim, method, target), target, status)


POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
POST += f"Authorization: Bearer {ALPHA}\r\n"
HI = json.dumps(CHAT)


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\0\0\0\0\r\n\r\n", 400, "invalid_http"),
        (b"GET\r\n\r\n", 400, "invalid_http"),
        (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nbad name: y\r\n\r\n", 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: a\0b\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 70_000, 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X-A: a\r\n" * 9000, 400, "invalid_http"),
        (b"GET /" + b"a" * 70_000, 400, "invalid_http"),
        (f"{POST}Content-Length: -1\r\n\r\n{{}}".encode(), 400, "invalid_http"),
        (f"{POST}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}".encode(), 400, "invalid_http"),
        (f"{POST}Content-Length: 0x2\r\n\r\n{{}}".encode(), 400, "invalid_http"),
        (f"{POST}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(), 400, "invalid_request"),
        (f"{POST}Transfer-Encoding: gzip\r\n\r\n{{}}".encode(), 400, "invalid_http"),
        (f"{POST}Transfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n".encode(), 400, None),
        (f"{POST}Content-Length: 99\r\n\r\n{{}}".encode(), 408, "request_timeout"),
        (f"{POST}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n".encode(), 408, "request_timeout"),
        (f"{POST}X-Request-Timeout: never\r\nContent-Length: {len(HI)}\r\n\r\n{HI}".encode(), 400, None),
        (f"{POST}X-Session-ID: ../x\r\nContent-Length: {len(HI)}\r\n\r\n{HI}".encode(), 400, None),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_what_is_hardly_http_is_refused(victim: Victim, data: bytes, status: int, code: str | None):
    check_envelope(send(victim, data), "/", status, code)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {ALPHA}"},
        {"Authorization": ALPHA},
        {"Authorization": f"Bearer {ALPHA}x"},
        {"Authorization": f"Bearer {ALPHA[:-1]}"},
        {"Authorization": f"Bearer {ALPHA},{BETA}"},
        {"Authorization": "Bearer \xff\xfe\xfd"},
        {"Authorization": "Bearer " + "k" * 20_000},
        {"X-Api-Key": "sk-wrong-key"},
        {"X-Api-Key": ALPHA, "Authorization": "Bearer sk-wrong-key"},
        {"Cookie": f"key={ALPHA}"},
    ],
    ids=lambda headers: repr(headers)[:50],
)
def test_no_way_around_the_key(victim: Victim, headers: dict[str, str]):
    for target in ("/v1/models", "/metrics", "/v1/sessions/mine", "/nowhere", "/v1/events", "/openapi.json"):
        check_envelope(ask(victim, "GET", target, key=None, headers=dict(headers)), target, 401, "invalid_api_key")
    target = f"/v1/models?api_key={ALPHA}"
    check_envelope(ask(victim, "GET", target, key=None, headers=dict(headers)), target, 401, "invalid_api_key")


def test_what_is_another_keys_is_not_there(victim: Victim):
    def made(target: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = ask(victim, "POST", target, body)
        assert reply.status == 200, reply.body
        found: dict[str, Any] = reply.json()
        return found

    response = made("/v1/responses", {**MODEL, "input": "a secret"})["id"]
    conversation = made("/v1/conversations", {"items": "a secret"})["id"]
    items = ask(victim, "GET", f"/v1/conversations/{conversation}/items").json()["data"]
    theirs: list[tuple[str, str, object, int]] = [
        ("GET", f"/v1/responses/{response}", None, 404),
        ("DELETE", f"/v1/responses/{response}", None, 404),
        ("POST", f"/v1/responses/{response}/cancel", None, 404),
        ("GET", f"/v1/responses/{response}/input_items", None, 404),
        ("POST", "/v1/responses", {**MODEL, "input": "x", "previous_response_id": response}, 400),
        ("POST", "/v1/responses", {**MODEL, "input": "x", "conversation": conversation}, 404),
        ("POST", "/v1/responses/input_tokens", {**MODEL, "input": "x", "previous_response_id": response}, 400),
        ("GET", f"/v1/conversations/{conversation}", None, 404),
        ("POST", f"/v1/conversations/{conversation}", {"metadata": {"a": "b"}}, 404),
        ("DELETE", f"/v1/conversations/{conversation}", None, 404),
        ("GET", f"/v1/conversations/{conversation}/items", None, 404),
        ("POST", f"/v1/conversations/{conversation}/items", {"items": items}, 404),
        ("GET", f"/v1/conversations/{conversation}/items/{items[0]['id']}", None, 404),
        ("DELETE", f"/v1/conversations/{conversation}/items/{items[0]['id']}", None, 404),
        ("GET", "/v1/sessions/mine", None, 404),
        ("PATCH", "/v1/sessions/mine", {"pinned": True}, 404),
        ("DELETE", "/v1/sessions/mine", None, 404),
        ("POST", "/v1/sessions/mine/prefetch", None, 404),
    ]
    for method, target, body, status in theirs:
        for key in (BETA, ADMIN):  # an admin sees the queue, not what was said
            reply = ask(victim, method, target, body, key=key)
            check_envelope(reply, target, status)
            assert b"secret" not in reply.body
    for query in ("", "?after=mind", "?after=mine", "?after=%00"):
        assert ask(victim, "GET", "/v1/sessions" + query, key=BETA).json()["data"] == []
    assert ask(victim, "GET", f"/v1/responses/{response}").status == 200
    assert len(ask(victim, "GET", f"/v1/conversations/{conversation}/items").json()["data"]) == 1
    assert ask(victim, "GET", "/v1/sessions/mine").status == 200


WHOLE = request_bytes(
    "POST",
    "/v1/chat/completions",
    json.dumps({**CHAT, "stream": True}).encode(),
    {
        "Authorization": f"Bearer {ALPHA}",
        "Content-Type": "application/json",
        "Content-Length": str(len(json.dumps({**CHAT, "stream": True}))),
    },
)
PLAIN = WHOLE.replace(b'"stream": true', b'"stream":false')
EVENTS = request_bytes("GET", "/v1/events", headers={"Authorization": f"Bearer {ALPHA}"})
HEAD_END = WHOLE.index(b"\r\n\r\n") + 4


@contextmanager
def slow_answers(victim: Victim, **changes: Any) -> Iterator[None]:
    script = victim.engine.script
    before = {name: getattr(script, name) for name in changes}
    for name, value in changes.items():
        setattr(script, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(script, name, value)


@pytest.mark.parametrize(
    "sent",
    [b"", WHOLE[:1], WHOLE[:30], WHOLE[: HEAD_END - 2], WHOLE[:HEAD_END], WHOLE[:-5], WHOLE, PLAIN, EVENTS],
    ids=["connect", "byte", "line", "headers", "no body", "half a body", "stream", "plain", "events"],
)
@pytest.mark.parametrize("how", ["close", "reset", "half-close", "after a part", "twice"])
def test_who_leaves_at_any_moment_leaves_nothing_behind(victim: Victim, sent: bytes, how: str):
    with slow_answers(victim, step_s=0.02, answer="fox " * 100):
        connections = [victim.connect() for _ in range(2 if how == "twice" else 1)]
        for connection in connections:
            connection.sendall(sent)
            if how == "after a part" and sent in (WHOLE, EVENTS):
                assert connection.recv(300)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how == "half-close":
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    while connection.recv(65_536):
                        pass
        for connection in connections:
            connection.close()
        idle(victim)


def idle(victim: Victim) -> None:
    """Nothing is in use but, now and then, the connection of who watches the health."""

    def is_idle() -> bool:
        used = victim.in_use()
        watching = ("connections", "requests", "tasks", "descriptors")
        return all(count <= (3 if name in watching else 0) for name, count in used.items())

    try:
        eventually(is_idle, timeout_s=5)
    except AssertionError:
        raise AssertionError(victim.in_use()) from None


@pytest.mark.parametrize(("size", "status"), [(60_000, 200), (66_000, 400), (100_000, 400), (240_000, 400)])
@pytest.mark.parametrize("count", [1, 20])
def test_headers_have_at_most_64_kib_in_whatever_pieces_they_come(victim: Victim, size: int, status: int, count: int):
    headers = {f"X-Long-{number}": "a" * (size // count) for number in range(count)}
    reply = send(victim, request_bytes("GET", "/health", headers=headers))
    assert reply.status == status
    if status == 400:
        check_envelope(reply, "/health", 400, "invalid_http")


def test_headers_that_come_too_slowly_end_the_connection(victim: Victim):
    with closing(victim.connect()) as silent, closing(victim.connect()) as dripping:
        start = time.monotonic()
        for byte in WHOLE[:HEAD_END]:
            try:
                dripping.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.02)
        assert time.monotonic() - start < 0.02 * HEAD_END  # it did not take all of them
        for connection in (silent, dripping):
            check_envelope(read(connection), "/", 408, "request_timeout")


def test_a_body_that_goes_on_behind_its_answer_ends_the_connection(victim: Victim):
    head = f"{POST}Content-Length: 99999999\r\n\r\n".encode()
    with closing(victim.connect()) as connection:
        connection.sendall(head)
        check_envelope(read(connection), "/v1/chat/completions", 413)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(200):
                connection.sendall(b" " * 100)
                time.sleep(0.02)
            raise AssertionError("the server reads on for ever")


def test_pipelined_requests_are_answered_in_order(victim: Victim):
    first = request_bytes("GET", "/v1/models", headers={"Authorization": f"Bearer {ALPHA}"})
    second = request_bytes("GET", "/v1/models", headers={"Authorization": f"Bearer {ALPHA[:-1]}"})
    with closing(victim.connect()) as connection:
        connection.sendall(first * 3 + second)
        text = b""
        while b"invalid_api_key" not in text:
            text += connection.recv(65_536)
        assert re.findall(rb"HTTP/1.1 (\d+)", text) == [b"200", b"200", b"200", b"401"]


def test_connections_beyond_the_limit_are_told_so_and_the_others_live(victim: Victim):
    idle(victim)
    with victim.asking, ExitStack() as stack:
        for _ in range(LIMITS["connections"]):
            stack.enter_context(closing(victim.connect()))
        late = stack.enter_context(closing(victim.connect()))
        reply = read(late)
        check_envelope(reply, "/", 503, "overloaded")
        assert reply.headers["retry-after"] == "1"
    idle(victim)
    assert ask(victim, "GET", "/v1/models").status == 200


def test_many_at_once_are_all_answered(victim: Victim):
    replies: list[int] = []

    def attack(number: int) -> None:
        for name, (body, status, _) in list(BAD_BODIES.items())[number::8]:
            target = list(BODY_ROUTES)[number]
            reply = ask(victim, method_of(target), target, body)
            replies.append(200 if name == "an endless number" else reply.status - status)

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == len(BAD_BODIES)
    assert sorted(set(replies)) == [0, 200]


def test_at_the_end_nothing_is_left_and_health_was_never_blocked(victim: Victim):
    """The last one: of all that went before."""
    victim.over.set()
    eventually(lambda: not any(victim.in_use().values()))
    assert victim.longest_s < HEALTH_S
    assert ask(victim, "POST", "/v1/chat/completions", CHAT).status == 200
