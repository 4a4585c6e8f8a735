"""Tests which rung of the ladder takes which part of a recorded answer, and which text it leaves."""

from array import array

import pytest

from reprise.app.conversations.digests import digest
from reprise.app.conversations.rendered_chat import RenderedChat
from reprise.app.conversations.splice import (
    Candidate,
    Splice,
    changed,
    cut,
    exact,
    in_place,
    prompt_alone,
    shifted,
    splice_of,
)
from reprise.app.conversations.transcript_store import RecordedAnswer
from reprise.app.text.tokenizer import SHIELD
from tests.app.conversations.test_transcripts import TRIMS, assistant, tokenizer_with, user
from tests.app.text.families.samples import tokenizer_for
from tools.bundled_model.corpus import CHAT_TEMPLATE

PIECES = ("the", " cat", " sat", " on", " the", " mat")
SAID = "".join(PIECES)
REST = "<|im_end|>\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n"


def chat_of(content: str, *, template: str = CHAT_TEMPLATE, question: str = "Where?") -> RenderedChat:
    tokenizer = tokenizer_with(template)
    messages = [user(question), assistant(content), user("and")]
    text = tokenizer.render(messages, tools=None, template_args={}, add_generation_prompt=True)
    return RenderedChat(
        tokenizer=tokenizer, tenant="t", session_id=None, messages=messages, tools=None, template_args={},
        text=text, chain=[bytes([n]) for n in range(4)], placeholder="0f1e2d3c4b5a6978",
    )  # fmt: skip


def candidate_of(
    chat: RenderedChat, *, pieces: tuple[str, ...] = PIECES, is_exact: bool = True, is_known: bool = True
) -> Candidate:
    """A recorded answer to "Where?", one token to a piece."""
    prompt = chat.render([user("Where?")])
    ids = [token for piece in pieces for token in chat.tokenizer.encode(piece)]  # type: ignore[attr-defined]
    detokenizer = chat.tokenizer.detokenizer()  # type: ignore[attr-defined]
    for token in ids:
        detokenizer.push(token)
    answer = RecordedAnswer(
        id=1, session_id="s", chain=b"", bare=b"", digest=b"", text="".join(pieces),
        ends=array("I", detokenizer.text_ends), token_ids=array("I", ids),
        prompt_chars=len(prompt), prompt_digest=digest(prompt), continues=False,
    )  # fmt: skip
    return Candidate(1, answer, is_exact, is_known, has_same_prompt=chat.text.startswith(prompt))


def unshielded(splice: Splice | None) -> tuple[int, str] | None:
    return None if splice is None else (splice.kept_tokens, splice.rest.replace(SHIELD, ""))


def test_an_answer_that_stands_as_it_was_generated_is_kept_whole():
    chat = chat_of(SAID)
    assert unshielded(exact(chat, candidate_of(chat))) == (len(PIECES), REST)
    assert splice_of(chat, candidate_of(chat)) == exact(chat, candidate_of(chat))


@pytest.mark.parametrize(("content", "kept"), [("the cat sat", 3), ("the cat sits", 2), ("a dog", 0)])
def test_a_sibling_is_kept_as_far_as_the_client_sent_it_back(content: str, kept: int):
    chat = chat_of(content)
    sibling = candidate_of(chat, is_exact=False)
    expected = (kept, content.removeprefix("".join(PIECES[:kept])) + REST)
    assert unshielded(in_place(chat, sibling)) == unshielded(splice_of(chat, sibling)) == expected


def test_a_token_that_marks_the_end_of_a_call_is_kept_and_the_end_of_turn_is_not():
    tokenizer = tokenizer_for("lfm2")
    end = tokenizer.encode("<|im_end|>")
    ids = tokenizer.encode("<|tool_call_start|>[f()]<|tool_call_end|>") + end
    answer = RecordedAnswer(
        id=1, session_id="s", chain=b"", bare=b"", digest=b"", text="[f()]", ends=array("I", [0, 1, 2, 3, 4, 5, 5, 5]),
        token_ids=array("I", ids), prompt_chars=0, prompt_digest=b"", continues=False,
    )  # fmt: skip
    assert cut(tokenizer, answer, 5, "", REST) == Splice(len(ids) - 1, REST)
    # Where the template writes the mark itself, it would be there twice.
    assert cut(tokenizer, answer, 5, "", "<|tool_call_end|>" + REST).kept_tokens == len(ids) - 2


def test_an_answer_that_the_template_changes_is_found_by_what_stands_around_it():
    pieces = (*PIECES, "\n")  # the template trims the line break
    chat = chat_of("".join(pieces), template=TRIMS)
    candidate = candidate_of(chat, pieces=pieces)
    assert exact(chat, candidate) is in_place(chat, candidate) is None
    assert unshielded(changed(chat, candidate)) == unshielded(splice_of(chat, candidate)) == (len(pieces), REST)


def test_of_an_edited_answer_that_the_template_changes_only_the_prompt_is_kept():
    chat = chat_of("the cat sat \n", template=TRIMS)
    chat.messages[1]["tool_calls"] = [{"name": "f"}]  # this template does not show calls
    sibling = candidate_of(chat, is_exact=False)
    assert in_place(chat, sibling) is changed(chat, sibling) is None
    expected = (0, "the cat sat" + REST)
    assert unshielded(prompt_alone(chat, sibling)) == unshielded(splice_of(chat, sibling)) == expected
    assert splice_of(chat, candidate_of(chat, is_exact=False, is_known=False)) is None


def test_nothing_is_kept_behind_another_prompt():
    chat = chat_of(SAID, question="When?")
    for is_exact in (True, False):
        assert splice_of(chat, candidate_of(chat, is_exact=is_exact)) is None


def test_a_shifted_answer_is_kept_whatever_stands_before_it():
    chat = chat_of(SAID, question="When?")
    assert unshielded(shifted(chat, 1, candidate_of(chat).answer)) == (len(PIECES), REST)
