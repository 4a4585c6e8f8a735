"""Tests what a gateway answers itself, whom it lets in, and what it passes on."""

import asyncio
import gzip
import json
import subprocess
import sys

import pytest

from reprise.app.tenancy.keyring import digest_of
from reprise.fleet.identify import background_id
from reprise.fleet.keys import SessionName
from tests.fleet.gateway.harness import CHAT, fleet, one_answer, record
from tests.fleet.gateway.stub_replica import Asked

KEY, ADMIN = "key-of-alice", "key-of-admin"
WITH_KEYS = {"server": {"api_keys": (KEY,), "admin_keys": (ADMIN,)}}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def echo(asked: Asked) -> None:
    told = {"target": asked.target.decode(), "method": asked.method.decode(), "body": asked.body.decode("latin-1")}
    await asked.plain(json.dumps(told).encode(), headers=b"x-session-id: s\r\naccess-control-allow-origin: *\r\n")


async def test_health_and_readiness():
    async with fleet(a=one_answer) as whole:
        assert (await whole.client.get("/health")).json() == {"status": "ok", "replicas": 1, "redis": "ok"}
        assert (await whole.client.get("/ready")).status_code == 200
        del whole.directory.beats["a"]
        await whole.refresh()
        refused = await whole.client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert (await whole.client.get("/health")).status_code == 200


async def test_a_draining_gateway_takes_nothing_new():
    async with fleet(a=one_answer) as whole:
        whole.gateway.is_draining = True
        assert (await whole.client.get("/ready")).json()["error"]["code"] == "draining"
        answer = await whole.client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert whole.replicas["a"].asked == []


async def test_a_key_is_needed_and_goes_on_to_the_replica():
    async with fleet(WITH_KEYS, a=one_answer) as whole:
        refused = await whole.client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        anthropic = await whole.client.post("/v1/messages", json=CHAT)
        assert anthropic.json()["type"] == "error"
        answer, _, _ = await whole.stream(**bearer(KEY))
        assert answer.status_code == 200
        assert whole.replicas["a"].asked[0].headers[b"authorization"] == f"Bearer {KEY}".encode()


@pytest.mark.parametrize("path", ["/v1/fleet", "/v1/fleet/targets"])
async def test_the_fleet_is_shown_to_admins(path):
    async with fleet(WITH_KEYS, a=one_answer) as whole:
        assert (await whole.client.get(path, headers=bearer(KEY))).status_code == 403
        assert (await whole.client.get(path, headers=bearer(ADMIN))).status_code == 200


async def test_the_fleet_and_its_targets():
    async with fleet(a=one_answer, b=one_answer) as whole:
        whole.hear("b", state="loading", load=None)
        await whole.refresh()
        shown = (await whole.client.get("/v1/fleet")).json()
        assert [(one["replica"], one["state"], one["open"]) for one in shown["replicas"]] == [
            ("a", "ready", True),
            ("b", "loading", False),
        ]
        targets = (await whole.client.get("/v1/fleet/targets")).json()
        assert targets[0]["targets"] == [whole.replicas["a"].url.removeprefix("http://")]
        assert targets[0]["labels"]["replica"] == "a"


async def test_what_became_of_turns_is_counted():
    async with fleet(a=one_answer, b=one_answer) as whole:
        whole.directory.records[SessionName("local", "s")] = record("gone")
        await whole.stream(**{"x-session-id": "s"})
        await whole.stream()
        counted = (await whole.client.get("/v1/fleet?limit=1")).json()
        assert (len(counted["replicas"]), counted["has_more"], counted["states"]) == (1, True, {"ready": 2})
        assert {route: count for route, count in counted["gateway"]["routes"].items() if count} == {
            "new": 1,
            "moved": 1,
        }
        assert counted["gateway"]["moves"]["dead"] == 1
        assert counted["gateway"]["resumes"] == {"done": 0, "lost": 0}


async def test_the_page_is_there_without_a_replica():
    async with fleet(WITH_KEYS) as whole:
        answer = await whole.client.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        found = await whole.client.get("/page/fleet.js", headers={"if-none-match": "x"})
        assert found.status_code == 200
        again = await whole.client.get("/page/fleet.js", headers={"if-none-match": found.headers["etag"]})
        assert again.status_code == 304
        assert (await whole.client.get("/page/../secret")).status_code in (401, 503)


async def test_an_operator_drains_and_moves():
    async with fleet(a=one_answer, b=one_answer) as whole:
        post = whole.client.post
        assert (await post("/v1/fleet/drain", json={"replica": "a"})).json() == {"replica": "a", "draining": True}
        await whole.refresh()
        whole.hear("a")
        assert [await _served_by(whole) for _ in range(3)] == ["b"] * 3
        await post("/v1/fleet/drain", json={"replica": "a", "on": False})
        assert whole.directory.drained == set()
        whole.directory.records[SessionName("local", "s")] = record("b")
        moved = await post("/v1/fleet/move", json={"session_id": "s", "replica": "a"})
        assert moved.status_code == 200
        assert whole.directory.records[SessionName("local", "s")].wanted == "a"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("drain", {"replica": "x"}, 404),
        ("drain", {"replica": 5}, 400),
        ("drain", {"replica": "a", "on": "no"}, 400),
        ("move", {"session_id": "s", "replica": "x"}, 404),
        ("move", {"session_id": "s", "replica": "a"}, 404),
        ("move", {"session_id": "../x", "replica": "a"}, 404),
        ("move", {"replica": "a"}, 400),
    ],
)
async def test_an_operator_is_told_what_is_wrong(path, body, status):
    async with fleet(a=one_answer) as whole:
        assert (await whole.client.post(f"/v1/fleet/{path}", json=body)).status_code == status


async def _served_by(whole) -> str:
    answer, _, _ = await whole.stream()
    return answer.headers["x-route"].split(";")[0].removeprefix("replica=")


async def test_other_requests_are_passed_on_as_they_are():
    async with fleet(a=echo) as whole:
        answer = await whole.client.post("/v1/conversations/c%2Fd?x=%20", json={"items": []})
        told = answer.json()
        assert (told["method"], told["target"]) == ("POST", "/v1/conversations/c%2Fd?x=%20")
        assert json.loads(told["body"]) == {"items": []}
        assert answer.headers["x-session-id"] == "s"
        assert "access-control-allow-origin" not in answer.headers, "that is the gateway's to say"
        prefetch = await whole.client.post("/v1/sessions/s/prefetch")
        assert prefetch.json()["method"] == "POST"
        for path in ("/health", "/v1/health", "/ready", "/v1/files"):
            assert (await whole.client.head(path)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions/"])
async def test_a_compressed_body_and_an_odd_path_reach_the_replica_plain(path):
    async with fleet({"limits": {"body_bytes": 5000}}, a=one_answer) as whole:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        body = json.dumps(CHAT).encode()
        answer = await whole.client.post(path, content=gzip.compress(body), headers=headers)
        assert answer.status_code == 200
        (asked,) = whole.replicas["a"].asked
        assert (asked.target, asked.body) == (b"/v1/chat/completions", body)
        assert b"content-encoding" not in asked.headers
        bomb = await whole.client.post(path, content=gzip.compress(b" " * 1_000_000), headers=headers)
        assert (bomb.status_code, bomb.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_request_about_a_session_goes_to_its_home():
    async with fleet(a=echo, b=echo) as whole:
        for home in ("a", "b"):
            whole.directory.records[SessionName("local", "s")] = record(home)
            assert (await whole.client.delete("/v1/sessions/s")).status_code == 200
            assert whole.replicas[home].asked[-1].method == b"DELETE"


async def test_a_response_in_the_background_is_asked_where_it_runs():
    async with fleet(**dict.fromkeys("abcd", echo)) as whole:
        for name in "abcd":
            path = f"/v1/responses/{background_id('resp_' + 48 * '5', name)}"
            assert (await whole.client.get(path)).status_code == 200
            assert whole.replicas[name].asked[-1].target.decode() == path
            assert (await whole.client.post(f"{path}/cancel")).status_code == 200
            assert whole.replicas[name].asked[-1].method == b"POST"
        await whole.replicas["d"].stop()
        assert (await whole.client.get(path)).status_code == 200, "it is over there; any replica says so"


@pytest.mark.parametrize(("method", "tries"), [("GET", 2), ("POST", 1)])
async def test_what_may_have_been_done_is_not_done_twice(method, tries):
    async def cut(asked: Asked) -> None:
        asked.cut()

    async with fleet(a=cut, b=cut) as whole:
        answer = await whole.client.request(method, "/v1/conversations", json={} if method == "POST" else None)
        assert answer.status_code == (503 if method == "GET" else 502)
        assert sum(len(replica.asked) for replica in whole.replicas.values()) == tries


def listing(*ids: tuple[str, float], more: bool = False):
    async def answer(asked: Asked) -> None:
        data = [
            {"id": name, "cache_salt": None, "last_used_at": used, "by": asked.headers[b"host"].decode()}
            for name, used in ids
        ]
        await asked.plain(json.dumps({"object": "list", "data": data, "has_more": more}).encode())

    return answer


async def test_the_sessions_of_all_replicas_are_one_list():
    async with fleet(a=listing(("s1", 1.0), ("s3", 9.0)), b=listing(("s2", 2.0), ("s3", 5.0))) as whole:
        told = (await whole.client.get("/v1/sessions?limit=2")).json()
        assert [one["id"] for one in told["data"]] == ["s1", "s2"]
        assert (told["first_id"], told["last_id"], told["has_more"]) == ("s1", "s2", True)
        told = (await whole.client.get("/v1/sessions")).json()
        assert [(one["id"], one["last_used_at"]) for one in told["data"]] == [("s1", 1.0), ("s2", 2.0), ("s3", 9.0)]
        assert told["has_more"] is False


async def test_a_list_is_what_those_who_answer_have():
    async def wrong(asked: Asked) -> None:
        await asked.plain(b'{"error":{"message":"no","code":null,"param":"limit"}}', status=400)

    async with fleet(a=listing(("s1", 1.0)), b=wrong) as whole:
        assert len((await whole.client.get("/v1/sessions")).json()["data"]) == 1
        whole.replicas["a"].answer = wrong
        refused = await whole.client.get("/v1/sessions")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, None, "limit")


async def test_the_models_of_all_replicas_are_one_list():
    async def models(asked: Asked) -> None:
        port = asked.writer.get_extra_info("sockname")[1]
        listed = {"object": "list", "data": [{"id": "same"}, {"id": f"m{port}"}]}
        codex = {"models": []} if b"client_version" in asked.target else {}
        await asked.plain(json.dumps({**listed, **codex}).encode())

    async with fleet(a=models, b=models, c=models) as whole:
        whole.hear("b", fingerprint="aa")
        await whole.refresh()
        told = (await whole.client.get("/v1/models")).json()
        assert len(told["data"]) == 3
        assert sum(len(replica.asked) for replica in whole.replicas.values()) == 2, "one of each model"
        assert (await whole.client.get("/v1/models?client_version=1")).json()["models"] == []
        await whole.replicas["a"].stop()
        assert len((await whole.client.get("/v1/models")).json()["data"]) == 3, "another one of its model answers"


async def test_what_is_about_a_model_is_asked_of_a_replica_that_serves_it():
    async with fleet(a=echo, b=echo) as whole:
        whole.hear("b", fingerprint="aa", model="org/other", aliases=("o",))
        await whole.refresh()
        for name, replica in (("m", "a"), ("org/other", "b"), ("o", "b")):
            asked = whole.replicas[replica].asked
            for count in range(1, 3):
                await whole.client.get(f"/v1/models/{name}")
                assert asked[-1].target.decode() == f"/v1/models/{name}"
                await whole.client.post("/tokenize", json={"model": name, "prompt": f"{count}"})
                assert json.loads(asked[-1].body)["prompt"] == f"{count}"
        assert (await whole.client.get("/v1/models/nobody-has-it")).status_code == 200, "a replica says that it is not"


async def test_a_key_has_its_allowance_over_the_fleet():
    limits = {**WITH_KEYS, "limits": {"key_requests_per_minute": 5, "key_tokens_per_minute": 100}}
    async with fleet(limits, a=one_answer) as whole:
        tenant = digest_of(KEY).hex()[:16]
        assert (await whole.stream(**bearer(KEY)))[0].status_code == 200
        assert whole.directory.taken == [(tenant, "r", 1), (tenant, "k", 0)]
        assert whole.replicas["a"].asked[0].headers[b"x-reprise-counted"] == b"1"
        whole.directory.wait_s = 8.0
        answer, data, _ = await whole.stream(**bearer(KEY))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
        assert json.loads(data)["error"]["code"] == "rate_limit_exceeded"
        whole.directory.is_away = True
        statuses = [(await whole.stream(**bearer(KEY)))[0].status_code for _ in range(7)]
        assert statuses == [200] * 5 + [429] * 2, "without Redis each gateway counts by itself"
        assert b"x-reprise-counted" not in whole.replicas["a"].asked[-1].headers, "and replicas hold the key too"


async def test_a_key_has_only_so_many_answers_under_way():
    gate = asyncio.Event()

    async def waits(asked: Asked) -> None:
        await gate.wait()
        await one_answer(asked)

    async with fleet({**WITH_KEYS, "limits": {"key_requests": 2}}, a=waits) as whole:
        tenant = digest_of(KEY).hex()[:16]
        streams = [asyncio.create_task(whole.stream(**bearer(KEY))) for _ in range(3)]
        done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0].status_code for task in done] == [429]
        gate.set()
        assert sorted(answer.status_code for answer, _, _ in await asyncio.gather(*streams)) == [200, 200, 429]
        assert whole.directory.places == {tenant: 0}
        whole.directory.places[tenant] = 2  # places of another gateway
        answer, data, _ = await whole.stream(**bearer(KEY))
        assert (answer.status_code, json.loads(data)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(answer.headers["retry-after"]) >= 1
        whole.directory.places[tenant] = 0
        answer, _, _ = await whole.stream(CHAT | {"n": 2}, **bearer(KEY))
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        whole.directory.is_away = True
        assert (await whole.stream(**bearer(KEY)))[0].status_code == 200


async def test_metrics_say_where_turns_went():
    async with fleet(a=one_answer) as whole:
        await whole.stream()
        await whole.client.get("/nonsense")
        text = (await whole.client.get("/metrics")).text
        assert 'reprise_gateway_requests_total{route="new"} 1.0' in text
        assert 'reprise_gateway_moves_total{why="dead"} 0.0' in text
        assert 'reprise_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'reprise_requests_total{route="other",' in text
        assert 'reprise_fleet_replicas{state="ready"} 1.0' in text
        assert 'reprise_redis_breaker{state="closed"} 1.0' in text


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"messages": 5}', b'{"messages": [{"role": []}]}'])
async def test_a_body_that_makes_no_sense_is_the_replicas_to_refuse(body):
    async with fleet(a=echo) as whole:
        answer = await whole.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        assert whole.replicas["a"].asked[0].body == body


async def test_a_body_that_is_too_long_is_refused():
    async with fleet({"limits": {"body_bytes": 2000}}, a=echo) as whole:
        answer = await whole.client.post("/v1/chat/completions", json={**CHAT, "user": "x" * 3000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert whole.gateway.parts.held.held == 0


def test_a_gateway_loads_neither_torch_nor_transformers():
    program = (
        "import sys, reprise.fleet.gateway.server\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
