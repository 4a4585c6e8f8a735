from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reprise.app.conversations.digests import link
from reprise.app.conversations.outline import MAX_OUTLINED, Asked, Mark, outline_of, tail_of

MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "odd"]), "content": st.sampled_from(["", "a", "b", None])},
    optional={"reasoning_content": st.sampled_from(["", "x", "y"]), "tool_calls": st.just([{"name": "f"}])},
)


def asked_of(messages: list[dict], **fields: Any) -> Asked:
    chain = [b"s" * 16]
    for message in messages:
        chain.append(link(chain[-1], message))
    return Asked(**{
        "tenant": "t", "model": "m", "template_digest": b"p", "template_args": {}, "tools": None, "tools_key": b"",
        "messages": messages, "chain": chain, **fields,
    })  # fmt: skip


@given(before=st.lists(MESSAGE, max_size=5), after=st.lists(MESSAGE, max_size=5), answer=MESSAGE)
def test_what_goes_on_from_an_outline_is_outlined_as_from_the_start(before: list, after: list, answer: dict) -> None:
    known = outline_of(asked_of(before), answer)
    asked = asked_of([*before, answer, *after])
    assert outline_of(asked, answer, known=known) == outline_of(asked, answer)
    other = asked_of([{"role": "user", "content": "another"}, *before, *after])
    assert outline_of(other, known=known) == outline_of(other)


@given(messages=st.lists(MESSAGE, max_size=5))
def test_a_mark_tells_the_fields_of_a_message_apart(messages: list) -> None:
    marks = outline_of(asked_of(messages)).marks
    assert len(marks) == len(messages)
    for message, mark in zip(messages, marks, strict=True):
        for other, its in zip(messages, marks, strict=True):
            assert (mark.content == its.content) == ((message["content"] or "") == (other["content"] or ""))
            assert (mark.thought == its.thought) == (
                (message.get("reasoning_content") or "") == (other.get("reasoning_content") or "")
            )
            assert (mark.rest == its.rest) == (message.get("tool_calls") == other.get("tool_calls"))
        assert bool(mark.thought) == bool(message.get("reasoning_content"))
        assert mark.role == (message["role"] if message["role"] != "odd" else "other")


def test_an_outline_is_bounded_and_holds_no_text() -> None:
    messages = [{"role": "user", "content": f"secret {n}" * 100} for n in range(3 * MAX_OUTLINED)]
    asked = asked_of(messages, template_args={f"secret {n}": "secret" * 1000 for n in range(1000)})
    outline = outline_of(asked, messages[0])
    assert len(outline.packed) == 13 * MAX_OUTLINED
    assert b"secret" not in outline.packed
    assert len(outline.arguments) == 64
    assert isinstance(outline.marks[0], Mark)


def test_the_tail_is_that_of_the_last_answer() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "tool")]
    answered = {**messages[2], "reasoning_content": "thought"}
    assert asked_of(messages).tail == tail_of("t", messages[1], answered) != tail_of("u", messages[1], answered)
    assert asked_of(messages[:2]).tail is None
    assert asked_of(messages).opening == asked_of(messages[1:]).opening != asked_of(messages[2:]).opening
