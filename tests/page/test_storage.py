"""Tests what leaves the browser's database and what comes into it: files of conversations, and what they may not do."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.app.fakes import Script
from tests.page.browser import answered, of_the_page, send
from tests.page.conftest import FORGET, forget_in_server
from tests.page.served import Served
from tests.page.test_sidebar import WRITE

pytestmark = pytest.mark.servers


@pytest.fixture(autouse=True)
def script(server: Served) -> Script:
    server.engine.script = Script()
    server.engine.session_error = None
    return server.engine.script


def reload(page: Any) -> None:
    page.reload()
    page.locator('#server[data-state="ready"]').wait_for()


def saved_as(page: Any, button: str, path: Path) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    download.value.save_as(path)
    return str(download.value.suggested_filename)


def bring(page: Any, content: bytes) -> None:
    page.locator("#import-file").set_input_files(
        {"name": "some.json", "mimeType": "application/json", "buffer": content}
    )


def test_all_conversations_go_through_a_file(page: Any, server: Served, tmp_path: Path) -> None:
    send(page, "One")
    page.get_by_role("button", name="Answer again").click()
    page.get_by_role("group", name="Versions of this answer").wait_for()
    answered(page, 1)
    page.get_by_role("button", name="New conversation").click()
    send(page, "Two")
    assert saved_as(page, "Export all", tmp_path / "all.json") == "conversations.json"
    page.evaluate(FORGET)
    forget_in_server(server)
    reload(page)
    assert page.locator("#conversations li").count() == 0
    for said in ("2 added.", "0 added, 2 were here already."):
        bring(page, (tmp_path / "all.json").read_bytes())
        page.get_by_text(said, exact=True).wait_for()
    assert page.locator("#conversations .open").all_inner_texts() == ["Two", "One"]
    page.locator("#conversations .open").last.click()
    page.get_by_role("group", name="Versions of this answer").wait_for()
    assert "to the first word" in page.locator(".provenance").inner_text()
    reload(page)
    send(page, "And now?")
    assert page.locator("article").count() == 4


def test_a_file_adds_what_the_server_did_not_have_of_a_conversation(page: Any, server: Served, tmp_path: Path) -> None:
    send(page, "One")
    page.get_by_role("button", name="Answer again").click()
    page.get_by_role("group", name="Versions of this answer").wait_for()
    answered(page, 1)
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit the message").fill("Instead")
    page.keyboard.press("Enter")
    page.get_by_role("group", name="Versions of this message").wait_for()
    answered(page, 1)
    saved_as(page, "Export all", tmp_path / "all.json")
    page.evaluate("location.hash = ''")
    page.evaluate(FORGET)
    reload(page)
    page.locator("#conversations .open").click()
    answered(page, 1)
    assert page.locator(".provenance").count() == 0
    for said in ("0 added, 1 that was here got more from the file.", "0 added, 1 was here already."):
        bring(page, (tmp_path / "all.json").read_bytes())
        page.get_by_text(said, exact=True).wait_for()
    page.locator(".provenance").wait_for()
    assert page.get_by_role("button", name="Continue").count() == 0, "the file knows that the answer was whole"
    page.get_by_role("button", name="Next version").click()
    page.get_by_role("group", name="Versions of this answer").get_by_text("2/2").wait_for()


def test_a_conversation_becomes_markdown(page: Any, tmp_path: Path) -> None:
    send(page, "What / is: it?")
    assert saved_as(page, "As Markdown", tmp_path / "one.md") == "What  is it.md"
    assert (tmp_path / "one.md").read_text() == (
        "# What / is: it?\n\n## You\n\nWhat / is: it?\n\n## Answer\n\nHello there, how are you today?\n"
    )


def conversation(**changes: Any) -> dict[str, Any]:
    message = {"id": 1, "parent": None, "role": "user", "content": "Hello"}
    return {"id": "page-x", "title": "Named", "updated": 5, "options": {}, "messages": [message], "head": 1, **changes}


CIRCLE = [
    {"id": 1, "parent": 2, "role": "user", "content": "a"},
    {"id": 2, "parent": 1, "role": "assistant", "content": "b"},
]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\x00 no", "The file is not JSON."),
        (b"[1, 2]", "holds no conversations"),
        (b'{"kind": "reprise-conversations", "conversations": [null]}', "Conversation 1 of the file is damaged."),
        *(
            (
                json.dumps(
                    {"kind": "reprise-conversations", "conversations": [conversation(id="page-0"), conversation(**one)]}
                ).encode(),
                "Conversation 2 of the file is damaged.",
            )
            for one in (
                {"id": "a/../b"},
                {"messages": CIRCLE},
                {"messages": [{"id": 1, "parent": None, "role": "system", "content": "x"}]},
                {"messages": [{"id": 1, "parent": None, "role": "user", "content": {"a": 1}}]},
            )
        ),
    ],
)
def test_a_damaged_file_adds_nothing(page: Any, content: bytes, said: str) -> None:
    bring(page, content)
    page.get_by_role("alert").filter(has_text="Not imported").filter(has_text=said).wait_for()
    assert page.locator("#conversations li").count() == 0


def test_odd_fields_of_a_file_are_left_out(page: Any) -> None:
    answer = {
        "id": 2, "parent": 1, "role": "assistant", "content": "<img src=x onerror=alert(1)>",
        "end": "evil", "limit": -1,
        "report": {"tokens": {"hbm": "many", "disk": 4}, "timings": {"queue_ms": "x"}, "reasons": 5}, "more": 1,
    }  # fmt: skip
    odd = conversation(title=7, head=99, options={"max_tokens": "x", "seed": 3, "model": "y"})
    odd["messages"].append(answer)
    bring(page, json.dumps({"kind": "reprise-conversations", "conversations": [odd]}).encode())
    page.get_by_text("1 added.").wait_for()
    page.locator("#conversations .open").click()
    shown = answered(page, 1)
    assert shown.locator(".text").inner_text() == "<img src=x onerror=alert(1)>"
    assert "on disk 4" in shown.locator(".bar").get_attribute("aria-label")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "And?")
    body = json.loads(asked.value.post_data)
    assert (body["seed"], body["model"], "max_tokens" in body) == (3, "test-model", False)


def test_figures_of_a_file_that_nothing_can_be_are_left_out(page: Any) -> None:
    huge = 1e300
    answer = {
        "id": 2, "parent": 1, "role": "assistant", "content": "Yes", "end": "length", "limit": 0.5,
        "thought": "So.", "thought_ms": huge,
        "report": {
            "tokens": {"hbm": huge, "disk": 4, "computed": 1.5}, "timings": {"queue_ms": huge},
            "reasons": {"new": huge},
            "ttft_ms": huge, "saved_ms": 9e99, "completion_tokens": huge,
        },
    }  # fmt: skip
    options = {
        "temperature": 99,
        "max_tokens": 0.5,
        "top_k": huge,
        "seed": 2**70,
        "top_p": 0.25,
        "repetition_penalty": 0,
    }
    odd = conversation(options=options, updated=huge, head=2)
    odd["messages"].append(answer)
    bring(page, json.dumps({"kind": "reprise-conversations", "conversations": [odd]}).encode())
    page.get_by_text("1 added.").wait_for()
    page.locator("#conversations .open").click()
    shown = answered(page, 1)
    assert page.locator("#conversations h2").all_inner_texts() == ["Today"]
    assert "on disk 4" in shown.locator(".bar").get_attribute("aria-label")
    assert "Ended where the model's window is full." in shown.inner_text()
    for figure in ("e+", "∞", "NaN", "Invalid", ",000,000"):
        assert figure not in shown.inner_text()
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "And?")
    body = json.loads(asked.value.post_data)
    assert body["top_p"] == 0.25
    assert {"temperature", "max_tokens", "top_k", "seed", "repetition_penalty"}.isdisjoint(body)
    newest = of_the_page("import('/page/store.js').then((store) => store.list()[0].updated)")
    assert page.evaluate(newest) <= time.time() * 1e3


def test_a_list_with_a_time_that_is_none_is_drawn(page: Any) -> None:
    """Draw what an earlier version of the page may have taken from a file."""
    page.evaluate(WRITE, [{"id": f"page-{n}", "title": "Odd", "daysAgo": -1e300, "said": "Odd"} for n in range(2)])
    reload(page)
    assert sorted(page.locator("#conversations .open").all_text_contents()) == ["Odd", "Odd, (2)"]


def test_a_database_that_was_closed_meanwhile_is_opened_again(page: Any) -> None:
    page.evaluate(FORGET)  # the page's connection closes for it
    send(page, "Hello")
    assert page.locator("#notice").is_hidden()
    reload(page)
    assert page.locator("article").count() == 2


def test_more_is_kept_than_local_storage_would_hold(page: Any) -> None:
    """12 Mi characters, where localStorage has 5."""
    page.evaluate(
        of_the_page("""async () => {
          const store = await import("/page/store.js");
          const all = Array.from({ length: 200 }, (_, n) => ({
            ...store.create(), title: `Chat ${n}`, revision: 1, head: 1,
            messages: [{ id: 1, parent: null, role: "user", content: "x".repeat(60_000) }],
          }));
          await store.adopt(all);
        }""")
    )
    send(page, "One more")
    reload(page)
    assert page.locator("#conversations .open").count() == 201
    assert page.locator("#notice").is_hidden()


def test_a_browser_without_a_database_says_so(page: Any, server: Served) -> None:
    other = page.context.new_page()
    other.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };")
    other.goto(server.url)
    other.locator('#server[data-state="ready"]').wait_for()
    send(other, "Hello")
    other.get_by_role("alert").filter(has_text="keeps nothing").wait_for()
    other.get_by_role("button", name="New conversation").click()
    other.locator("#conversations .open").filter(has_text="Hello").click()
    answered(other, 1)
    other.close()


@pytest.mark.parametrize("hangs", ["IDBFactory.prototype.open", "IDBObjectStore.prototype.getAll"])
def test_a_database_that_does_not_answer_is_gone_without(page: Any, server: Served, hangs: str) -> None:
    other = page.context.new_page()
    other.add_init_script(f"{hangs} = () => ({{}});")
    other.goto(server.url)
    other.get_by_role("alert").filter(has_text="storage does not answer").wait_for()
    send(other, "Hello")
    other.get_by_role("button", name="New conversation").click()
    other.locator("#conversations .open").filter(has_text="Hello").click()
    answered(other, 1)
    other.close()
