"""Tests that every cause is named: by outlines alone, and by the transcripts for requests that a client could send."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from reprise.app.conversations.digests import Message
from reprise.app.conversations.divergence import Change, Divergence, explain, hidden_by
from reprise.app.conversations.offered import Offered
from reprise.app.conversations.outline import outline_of
from tests.app.conversations.test_agent_turns import WHERE_ANY
from tests.app.conversations.test_outline import asked_of
from tests.app.conversations.test_transcripts import COUNTS, TRIMS, Client, assistant, in_memory, system, user

CALL = {"id": "c", "function": {"name": "read", "arguments": {"path": "a", "line": 1}}}
MESSAGES: list[Message] = [
    system("You are a cat. Time 12:01. Be brief."),
    user("where is the hat?"),
    {**assistant(""), "reasoning_content": "the hat", "tool_calls": [CALL]},
    {"role": "tool", "content": "on the mat", "tool_call_id": "c"},
    {**assistant("on the mat"), "reasoning_content": "the mat"},
    user("and the cat?"),
    assistant("on the hat"),
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Do {name}.", "parameters": {"type": "object"}}}
    for name in ("read", "write", "list", "find")
]


def difference(was: list[Message], now: list[Message], change: Change | None = None, **fields: Any) -> Divergence:
    """Explain a request that goes on from another with one answer more."""
    tools = fields.pop("tools", None)
    changed = fields.pop("changed", {})
    before = asked_of(was[:-1], tools=tools, tools_key=b"1" if tools else b"", **fields)
    after = asked_of([*now, user("more")], **{"tools": tools, "tools_key": b"1" if tools else b"", **fields, **changed})
    return explain(
        outline_of(before, was[-1]),
        outline_of(after),
        was_tools=tools,
        now_tools=after.tools,
        change=change or Change(token=7),
    )


def edited(index: int, **fields: Any) -> list[Message]:
    messages = copy.deepcopy(MESSAGES)
    messages[index] |= fields
    return messages


def dropping(index: int, name: str) -> list[Message]:
    messages = copy.deepcopy(MESSAGES)
    del messages[index][name]
    return messages


@pytest.mark.parametrize(
    ("messages", "message", "where", "sentence"),
    [
        (edited(3, content="under the mat"), 3, "content", "message 3 was edited"),
        (edited(6, content="under the hat"), 6, "content", "message 6 was edited"),
        (edited(3, tool_call_id="d"), 3, "fields", "a field of message 3 was edited"),
        (edited(2, tool_calls=[]), 2, "tool_calls", "the calls of message 2 were edited"),
        (edited(3, role="user"), 3, "role", "message 3 was edited: it was of the role tool"),
        (edited(0, content="You are a hat."), 0, "content", "the system prompt differs"),
        (
            dropping(2, "reasoning_content"), 2, "reasoning_content",
            "a reasoning text was not sent back, that of message 2",
        ),
        (edited(2, reasoning_content="a hat"), 2, "reasoning_content", "the reasoning text of message 2 was edited"),
        ([MESSAGES[0], *MESSAGES[5:]], 1, "messages", "4 messages were removed from the start"),
        (MESSAGES[5:], 0, "messages", "5 messages were removed from the start"),
        (MESSAGES[1:], 0, "messages", "the system prompt was removed"),
        ([MESSAGES[0], system("!"), *MESSAGES[1:]], 1, "messages", "a system prompt was added"),
        ([*MESSAGES[:3], *MESSAGES[4:]], 3, "messages", "1 message was removed from message 3 on"),
        ([*MESSAGES[:3], user("!"), *MESSAGES[3:]], 3, "messages", "1 message was inserted at message 3"),
        ([*MESSAGES[:3], MESSAGES[4], MESSAGES[3], *MESSAGES[5:]], 3, "messages", "the order of messages changed"),
        (MESSAGES, None, "template", "the template writes earlier messages in another way now"),
    ],
)  # fmt: skip
def test_what_happened_to_the_messages_is_named(
    messages: list[Message], message: int | None, where: str, sentence: str
) -> None:
    found = difference(MESSAGES, messages)
    role = None if message is None else messages[message]["role"]
    assert found == Divergence(message, role, where, 7, sentence)


def test_several_reasoning_texts_are_counted() -> None:
    bare = [{name: value for name, value in m.items() if name != "reasoning_content"} for m in MESSAGES]
    said = "reasoning texts of 2 messages were not sent back, the first that of message 2"
    assert difference(MESSAGES, bare).sentence == said
    assert difference(bare, MESSAGES).sentence == "a reasoning text that was not there before came with message 2"


def test_the_thought_of_the_recorded_answer_may_stay_away() -> None:
    was = [*MESSAGES[:-1], {**MESSAGES[-1], "reasoning_content": "hm"}]
    assert difference(was, MESSAGES).where == "template"


@pytest.mark.parametrize(
    ("before", "was", "now", "sentence"),
    [
        ("cat. Time 12:0", "1. Be", "2. Be",
         "the system prompt differs at 'cat. Time 12:0': a time of day in it makes every turn new"),
        ("It is ", "9:59 now", "10:00 now",
         "the system prompt differs at 'It is ': a time of day in it makes every turn new"),
        ("Today is 2026-11-2", "8.", "9.",
         "the system prompt differs at 'Today is 2026-11-2': a date in it makes every day's first turn new"),
        ("Today: ", "Monday", "Tuesday",
         "the system prompt differs at 'Today: ': a date in it makes every day's first turn new"),
        ("run ", "0123456789abcdef01", "f123456789abcdef01",
         "the system prompt differs at 'run ': an id in it makes every conversation new"),
        ("a line\nYou are a ", "cat", "hat", "the system prompt differs at 'You are a ', where 'cat' became 'hat'"),
        ("all that is in this directory of ", "a", "b",
         "the system prompt differs at 'is in this directory of ', where 'a' became 'b'"),
        ("the end", "", " of all that is in this directory\n",
         "the system prompt differs at 'the end', where 'of all that is in this' was added"),
        ("the end", ", or not\n", "\n", "the system prompt differs at 'the end', where ', or not' was removed"),
        ("", "cat", "hat\nand so on", "the system prompt differs at 'hat'"),
    ],
)  # fmt: skip
def test_what_changes_in_a_system_prompt_is_quoted(before: str, was: str, now: str, sentence: str) -> None:
    change = Change(token=7, message=0, before=before, was=was, now=now)
    assert difference(MESSAGES, edited(0, content="another"), change).sentence == sentence


def test_a_quote_is_of_the_message_that_differs() -> None:
    change = Change(token=7, message=5, before="on ", was="cat", now="hat")
    assert difference(MESSAGES, edited(3, content="another"), change).sentence == "message 3 was edited"
    assert difference(MESSAGES, edited(5, content="another"), change).sentence == (
        "message 5 was edited at 'on ', where 'cat' became 'hat'"
    )


def test_thoughts_that_the_template_dropped_are_counted() -> None:
    found = difference(MESSAGES, MESSAGES, Change(token=7, message=2, dropped_thoughts=2))
    assert found == Divergence(2, "assistant", "reasoning_content", 7, "the template dropped 2 thoughts")


@pytest.mark.parametrize(("numbers", "number"), [((-1, 0, 1, 2), 2), ((0, 2, 3, 4), 4)])
def test_messages_are_numbered_as_the_client_sent_them(numbers, number) -> None:
    """The server may have put one of its own first, or joined two."""
    was, now = asked_of(MESSAGES), asked_of(edited(3, content="another"))
    change = Change(token=7, message=3)
    found = explain(outline_of(was), outline_of(now), was_tools=None, now_tools=None, change=change, numbers=numbers)
    assert (found.message, found.role, found.sentence) == (number, "tool", f"message {number} was edited")


def changed_tool(index: int, **fields: Any) -> list[dict]:
    tools = copy.deepcopy(TOOLS)
    tools[index]["function"] |= fields
    return tools


def with_turned_keys(index: int, *, parameters_alone: bool) -> list[dict]:
    tools = copy.deepcopy(TOOLS)
    if parameters_alone:
        tools[index]["function"]["parameters"] = {"x": 1, "type": "object"}
    else:
        tools[index]["function"] = dict(reversed(tools[index]["function"].items()))
    return tools


@pytest.mark.parametrize(
    ("tools", "where", "sentence"),
    [
        (TOOLS[:3], "tools[3]", "the tool find was removed"),
        (TOOLS[:1], "tools[1]", "the tools write and 2 more were removed"),
        ([*TOOLS, *changed_tool(0, name="new")[:1]], "tools[4]", "the tool new was added"),
        ([], "tools[0]", "the tools read and 3 more were removed"),
        (list(reversed(TOOLS)), "tools[0]", "the order of the tools changed"),
        (changed_tool(1, description="Other."), "tools[1].description", "the description of the tool write changed"),
        (changed_tool(2, parameters={}), "tools[2].parameters", "the parameters of the tool list changed"),
        (changed_tool(2, strict=True), "tools[2].strict", "the strict of the tool list changed"),
        (with_turned_keys(3, parameters_alone=False), "tools[3]", "tools[3] has another key order"),
    ],
)
def test_what_happened_to_the_tools_is_named(tools: list, where: str, sentence: str) -> None:
    found = difference(MESSAGES, MESSAGES, tools=TOOLS, changed={"tools": tools, "tools_key": b"2"})
    assert found == Divergence(None, None, where, 7, sentence)


def test_another_key_order_inside_a_field_is_found() -> None:
    was = copy.deepcopy(TOOLS)
    was[3]["function"]["parameters"] = {"type": "object", "x": 1}
    now = with_turned_keys(3, parameters_alone=True)
    found = difference(MESSAGES, MESSAGES, tools=was, changed={"tools": now})
    assert (found.where, found.sentence) == ("tools[3].parameters", "tools[3] has another key order")


def test_tools_that_are_no_longer_known_are_said_to_have_changed() -> None:
    was, now = asked_of(MESSAGES, tools_key=b"1"), asked_of(MESSAGES, tools=TOOLS, tools_key=b"2")
    found = explain(outline_of(was), outline_of(now), was_tools=None, now_tools=TOOLS, change=Change(token=1))
    assert (found.where, found.sentence) == ("tools", "the tools changed")


@pytest.mark.parametrize(
    ("changed", "where", "sentence"),
    [
        ({"model": "n"}, "model", "the model or its template changed"),
        ({"template_digest": b"q"}, "template", "the model or its template changed"),
        (
            {"template_args": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking",
            "enable_thinking, an argument of the template, changed",
        ),
        (
            {"template_args": {"reasoning_effort": "low"}}, "reasoning_effort",
            "reasoning_effort, an argument of the template, changed",
        ),
    ],
)  # fmt: skip
def test_what_decides_the_whole_prompt_is_named_first(changed: dict, where: str, sentence: str) -> None:
    found = difference(MESSAGES, edited(3, content="another"), changed=changed)
    assert found == Divergence(None, None, where, 7, sentence)


def test_what_hides_a_conversation_is_named() -> None:
    assert hidden_by(["a"], "a") is None
    assert hidden_by([], "a") is None
    assert "another salt (cache_salt" in (hidden_by(["a", "a/red"], "a") or "")
    assert "another salt (cache_salt" in (hidden_by(["a", "b"], "a/red") or "")
    assert "another key has a conversation of this name" in (hidden_by(["a", "b"], "a") or "")


# The same from a client's requests


SAYS = ("c", "a", "t")


def conversation(client: Client, turns: int = 3) -> list[Message]:
    """Talk for some turns. Returns all messages, and one more of the user."""
    messages = [system("You are a cat. Time 12:01."), user("question 0")]
    for turn in range(turns):
        prompt = client.ask(messages)
        assert prompt.diverged is None
        messages += [client.answer(prompt, client.ids(*SAYS, f" {turn}")), user(f"question {turn + 1}")]
    return messages


def replaced(messages: list[Message], index: int, message: Message) -> list[Message]:
    return [*messages[:index], message, *messages[index + 1 :]]


@pytest.mark.parametrize(
    ("change", "message", "sentence"),
    [
        (
            lambda m: replaced(m, 0, system("You are a cat. Time 12:02.")), 0,
            "the system prompt differs at 'You are a cat. Time 12:0': a time of day in it makes every turn new",
        ),
        (lambda m: replaced(m, 3, user("another 1")), 3, "message 3 was edited"),
        (lambda m: replaced(m, 4, assistant("a dog")), 4, "message 4 was edited"),
        (lambda m: [m[0], *m[3:]], 1, "2 messages were removed from the start"),
        (lambda m: [m[0], m[3], m[2], m[1], *m[4:]], 1, "the order of messages changed"),
        (lambda m: [*m[:3], user("!"), *m[3:]], 3, "1 message was inserted at message 3"),
    ],
)  # fmt: skip
def test_a_request_that_leaves_its_conversation_says_where(
    change: Callable[[list[Message]], list[Message]], message: int, sentence: str
) -> None:
    client = Client(in_memory())
    messages = conversation(client)
    going_on = client.ask(messages)
    prompt = client.ask(change(messages))
    found = prompt.diverged
    assert found is not None
    assert found.message == message
    assert found.role == change(messages)[message]["role"]
    assert found.sentence.startswith(sentence)
    common = next(n for n, (a, b) in enumerate(zip(prompt.token_ids, going_on.token_ids, strict=False)) if a != b)
    assert found.token == common


@pytest.mark.parametrize("name", [None, "s"])
def test_a_long_text_that_differs_at_its_end_is_quoted_there(name: str | None) -> None:
    client = Client(in_memory())
    messages = [user("hello"), user("the cat sat on the mat. " * 100 + "one")]
    messages.append(client.answer(client.ask(messages, name), client.ids(*"the cat sat on the mat. " * 20, "two")))
    call = {"tool_calls": [CALL]}  # such an answer is tokenized anew, and not as it was generated
    for index, was, now in ((1, "one", "three"), (2, "two", "four")):
        changed = {**messages[index], "content": messages[index]["content"].replace(was, now)}
        changed |= call if index == 2 else {}
        found = client.ask([*replaced(messages, index, changed), user("more")], "s").diverged
        assert found is not None or name is None
        if found is not None:
            assert found.message == index
            assert found.sentence.endswith(f"sat on the mat. ', where '{was}' became '{now}'")


@pytest.mark.parametrize(
    ("change", "message", "sentence"),
    [
        (lambda m: replaced(m, 0, user("hallo")), 0, "message 0 was edited at 'h', where 'ello' became 'allo'"),
        (lambda m: [user("!"), *m], 0, "1 message was inserted at message 0"),
        (lambda m: [m[0], m[2]], 1, "the answer that came before message 1 was not sent back"),
        (lambda m: replaced(m, 1, assistant("a dog")), 1, "message 1 was edited at 'a dog'"),
    ],
)
def test_a_conversation_of_a_name_is_known_after_its_first_turn(
    change: Callable[[list[Message]], list[Message]], message: int, sentence: str
) -> None:
    client = Client(in_memory())
    answer = client.answer(client.ask([user("hello")], "s"), client.ids(*SAYS))
    messages = change([user("hello"), answer, user("more")])
    found = client.ask(messages, "s").diverged
    assert found is not None
    assert (found.message, found.sentence) == (message, sentence)
    assert client.ask([user("hallo"), assistant("a dog"), user("more")], "s").diverged is None, "another conversation"


def test_a_restart_forgets_no_reason(tmp_path) -> None:
    path = tmp_path / "transcripts.sqlite3"
    client = Client(in_memory(path=path))
    messages = conversation(client)
    client.transcripts.close()
    client.transcripts = in_memory(path=path)
    found = client.ask(replaced(messages, 3, user("another 1"))).diverged
    assert found is not None
    assert found.sentence.startswith("message 3 was edited")
    client.transcripts.close()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda m: m,  # the next turn
        lambda m: m[:-1],  # the same without a new message
        lambda m: m[:-2],  # the answer once more
        lambda m: [*m[:3], user("another")],  # a branch
        lambda m: [*m[:-2], assistant("ca"), user("!")],  # stopped by the client
        lambda m: m[:2],
        lambda m: [user("hello")],
        lambda m: [user("hello"), assistant("of another server"), user("more")],
    ],
)
def test_what_goes_on_or_begins_anew_has_nothing_to_explain(
    request_of: Callable[[list[Message]], list[Message]],
) -> None:
    client = Client(in_memory())
    messages = conversation(client)
    assert client.ask(request_of(messages)).diverged is None


def test_a_side_call_of_the_same_name_hides_nothing() -> None:
    client = Client(in_memory())
    messages = [user("question"), assistant("cat")]
    client.answer(client.ask(messages[:1], "s"), client.ids("cat"))
    client.answer(client.ask([system("a title"), user("title?")], "s"), client.ids("cats"))
    assert client.ask([*messages, user("more")], "s").diverged is None
    found = client.ask([system("new"), *messages, user("more")], "s").diverged
    assert found is not None
    assert found.sentence == "a system prompt was added"


def test_the_scope_of_a_request_is_compared() -> None:
    client = Client(in_memory())
    messages = conversation(client)
    for change, where in (
        ({"scope": {"model": "n", "tools": None, "template_args": {}}}, "model"),
        ({"template": TRIMS}, "template"),
        ({"scope": {"model": "m", "tools": None, "template_args": {"x": 1}}}, "chat_template_kwargs.x"),
    ):
        found = Client(**{**vars(client), **change}).ask(messages).diverged
        # Where the same ids come of it, nothing is lost.
        assert (found is None and where != "model") or (found is not None and found.where == where)
    assert Client(**{**vars(client), "tenant": "other"}).ask(messages).diverged is None


def test_a_tool_that_came_is_named() -> None:
    client = Client(in_memory(), template=WHERE_ANY.replace("{% set ns", "{{ tools | tojson }}{% set ns", 1))
    offers = [Offered.of(TOOLS[:n], tenant="t") for n in (2, 3)]
    asked = {
        "tokenizer": client.tokenizer, "tenant": "t", "session_id": None, "now": 0.0, "model": "m", "template_args": {},
    }  # fmt: skip
    prepare = client.transcripts.prepare
    prompt = prepare(messages=[user("hello")], tools=offers[0].tools, offered=offers[0], **asked)
    answer = client.answer(prompt, client.ids("cat"))
    messages = [user("hello"), answer, user("more")]
    prompt = prepare(messages=messages, tools=offers[1].tools, offered=offers[1], **asked)
    assert prompt.diverged is not None
    assert (prompt.diverged.where, prompt.diverged.sentence) == ("tools[2]", "the tool list was added")


def test_a_template_that_writes_history_anew_is_named() -> None:
    client = Client(in_memory(), template=COUNTS)
    prompt = client.ask([user("hello")])
    messages = [user("hello"), client.answer(prompt, client.ids(*SAYS)), user("more")]
    found = client.ask(messages).diverged
    assert found is not None
    assert found.where == "template"
    assert "the template writes" in found.sentence
