from typing import Any

import pytest

from reprise.app.conversations.response_store import not_reachable
from tests.app.api.responses.test_route import ANSWER, prompt_of, respond
from tests.app.fakes import Running

ITEM = {"type": "message", "role": "user", "content": "Hi"}


async def test_a_conversation_is_made_changed_and_deleted(running: Running):
    made = (await running.http.post("/v1/conversations", json={"metadata": {"a": "b"}, "items": [ITEM]})).json()
    path = f"/v1/conversations/{made['id']}"
    assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
    assert (await running.http.get(path)).json() == made
    changed = (await running.http.post(path, json={"metadata": {"c": "d"}})).json()
    assert changed == {**made, "metadata": {"c": "d"}}
    added = (await running.http.post(f"{path}/items", json={"items": [ITEM, ITEM]})).json()
    assert len(added["data"]) == 2
    listed = (await running.http.get(f"{path}/items?order=asc&limit=2")).json()
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    rest = (await running.http.get(f"{path}/items?order=asc&after={listed['last_id']}")).json()
    assert [item["id"] for item in rest["data"]] == [added["data"][-1]["id"]]
    item = f"{path}/items/{rest['last_id']}"
    assert (await running.http.get(item)).json() == rest["data"][0]
    assert (await running.http.delete(item)).json()["id"] == made["id"]
    for method, gone in (("GET", item), ("DELETE", item), ("GET", f"{path}/items?after=nothing")):
        response = await running.http.request(method, gone)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "item_not_found")
    assert (await running.http.delete(path)).json()["deleted"] is True
    for method, gone in (("GET", path), ("DELETE", path), ("GET", f"{path}/items"), ("GET", item)):
        response = await running.http.request(method, gone)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "conversation_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_go_on_with_it(running: Running, stream):
    made = (await running.http.post("/v1/conversations", json={"items": [ITEM]})).json()
    first = await respond(running, "Hello", conversation=made["id"], store=False, stream=stream)
    second = await respond(running, "More", conversation={"id": made["id"]}, stream=stream)
    assert {response.headers["x-session-id"] for response in (first, second)} == {made["id"]}
    text = prompt_of(running)
    assert text.count(ANSWER) == 1
    assert text.index("Hi") < text.index("Hello<") < text.index(ANSWER) < text.index("More")
    before, after = (submit.token_ids for submit in running.engine.submitted)
    assert after[: len(before)] == before
    items = (await running.http.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hi", "Hello", ANSWER, "More", ANSWER]


async def test_a_failed_response_adds_nothing(running: Running):
    made = (await running.http.post("/v1/conversations", json={})).json()
    running.engine.script.refuse = "overloaded"
    assert (await respond(running, conversation=made["id"])).status_code == 503
    assert (await running.http.get(f"/v1/conversations/{made['id']}/items")).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "status"),
    [({"items": "x" * 10}, 200), ({"items": [{"type": "frob"}]}, 400), ({"metadata": {"a": 1}}, 400),
     ({"items": [ITEM] * 4097}, 400), ({"metadata": {str(n): "" for n in range(17)}}, 400)],
)  # fmt: skip
async def test_bodies_are_checked(running: Running, body, status):
    assert (await running.http.post("/v1/conversations", json=body)).status_code == status


async def test_what_a_turn_adds_is_there_though_it_cannot_be_stored_yet(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    made = (await running.http.post("/v1/conversations", json={"items": [ITEM]})).json()
    path = f"/v1/conversations/{made['id']}/items"

    async def refuse(*_: Any) -> None:
        raise not_reachable()

    with monkeypatch.context() as patch:
        patch.setattr(running.app.state.responses.store, "append", refuse)
        await respond(running, "Hello", conversation=made["id"])
        assert len((await running.http.get(path)).json()["data"]) == 3
        added = await running.http.post(path, json={"items": [ITEM]})
        assert added.status_code == 503, "this would stand before what is not stored yet"
    await respond(running, "More", conversation=made["id"])
    listed = (await running.http.get(f"{path}?order=asc")).json()["data"]
    assert [item["role"] for item in listed] == ["user", "user", "assistant", "user", "assistant"]
    assert len(await running.app.state.responses.store.items("local", made["id"])) == 5
