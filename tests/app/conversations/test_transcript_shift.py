"""Tests clients that drop the earliest messages themselves."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reprise.app.conversations.transcripts
from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.conversations.transcripts import MIN_SHIFTED_TOKENS
from tests.app.conversations.test_transcripts import (
    ODD_SPLIT,
    STRIPS_THINKING,
    Client,
    assistant,
    in_memory,
    system,
    turns_of,
    user,
)
from tests.example_counts import examples
from tools.bundled_model.corpus import CHAT_TEMPLATE

BOS = "<|endoftext|>" + CHAT_TEMPLATE


class Dropper(Client):
    """A client that may send the end of a conversation only."""

    def shorten(self, messages: list[dict], **fields) -> PreparedPrompt:
        return self.transcripts.prepare(
            tokenizer=self.tokenizer, messages=messages,
            **dict(tenant=self.tenant, session_id=None, now=self.now, client_shift=True, **self.scope) | fields,
        )  # fmt: skip

    def talk(self, turns: int, lead: list[dict]) -> list[dict]:
        """A conversation of so many answers, each split as encoding would not split it."""
        messages = list(lead)
        for turn in range(turns):
            messages.append(user(f"say it {turn} times " + "and on " * 10))
            prompt = self.ask(messages)
            messages.append(self.answer(prompt, self.ids(*ODD_SPLIT, f" {turn}", " the cat" * 20, "<|im_end|>")))
        return messages


@pytest.fixture
def client() -> Dropper:
    return Dropper(in_memory())


def check(client: Client, prompt: PreparedPrompt, messages: list[dict]) -> None:
    """A shifted prompt is what the client sent, made of what is kept of the whole."""
    assert prompt.shift is not None
    stream, keep, resume = prompt.shift.stream, prompt.shift.keep, prompt.shift.resume
    assert 0 <= keep < resume < len(stream)
    assert prompt.token_ids == stream[:keep] + stream[resume:]
    assert client.text(prompt.token_ids) == client.rendered(messages)
    assert resume in prompt.shift.starts


@pytest.mark.parametrize("lead", [[], [system("be a cat")], [system("be"), system("a cat")]], ids=len)
@pytest.mark.parametrize("dropped", [1, 2, 3, 4])
def test_a_suffix_of_whole_messages_is_recognised(client: Dropper, lead: list[dict], dropped: int):
    whole = client.talk(6, lead)
    sent = [*lead, *whole[len(lead) + dropped :], user("next")]
    prompt = client.shorten(sent)
    check(client, prompt, sent)
    assert prompt.shift is not None
    assert client.text(prompt.shift.stream) == client.rendered([*whole, user("next")])
    assert client.by_message(prompt) == turns_of(sent)
    assert prompt.session_id == client.ask([*whole, user("other")]).session_id


def test_the_window_goes_on_moving_also_after_a_restart(tmp_path: Path):
    path = tmp_path / "transcripts.sqlite3"
    client = Dropper(in_memory(path=path))
    lead = [system("be a cat")]
    whole = client.talk(6, lead)
    sessions = set()
    for turn in range(8):
        if turn == 5:
            client.transcripts.close()
            client.transcripts = in_memory(path=path)
        whole.append(user(f"and then {turn}?"))
        sent = [*lead, *whole[-8 - turn % 2 * 2 :]]  # sometimes nothing more is dropped
        prompt = client.shorten(sent)
        check(client, prompt, sent)
        assert prompt.shift is not None
        assert client.text(prompt.shift.stream) == client.rendered(whole)
        sessions.add(prompt.session_id)
        whole.append(client.answer(prompt, client.ids(*ODD_SPLIT, f" {turn}", " the hat" * 30, "<|im_end|>")))
    assert len(sessions) == 1
    client.transcripts.close()


def test_a_text_in_front_of_the_first_message_stays():
    client = Dropper(in_memory(), template=BOS)
    whole = client.talk(5, [])
    sent = [*whole[2:], user("next")]
    prompt = client.shorten(sent)
    check(client, prompt, sent)
    assert prompt.shift is not None
    assert prompt.shift.keep == 1


def test_only_who_asks_for_it_gets_it(client: Dropper):
    whole = client.talk(5, [])
    assert client.ask([*whole[2:], user("next")]).shift is None


def test_a_conversation_in_full_is_no_shift(client: Dropper):
    lead = [system("be a cat")]
    whole = client.talk(5, lead)
    prompt = client.shorten([*whole, user("next")])
    assert prompt.shift is None
    assert prompt.spliced_tokens > 0


def test_too_little_that_is_kept_is_no_shift(client: Dropper):
    whole = client.talk(5, [])
    assert len(client.shorten([*whole[-2:], user("next")]).token_ids) < MIN_SHIFTED_TOKENS + 20
    assert client.shorten([*whole[-2:], user("next")]).shift is None


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: [user("something else"), *kept[1:]],
        lambda kept: [*kept[:3], assistant("edited"), *kept[4:]],
        lambda kept: [*kept[:2], *kept[4:]],  # dropped from the middle
        lambda kept: [*kept[:-1], assistant(kept[-1]["content"] + "!")],
        lambda kept: [system("be a dog"), *kept],
    ],
)
def test_what_is_no_suffix_is_computed(client: Dropper, change):
    whole = client.talk(7, [])
    sent = [*change(whole[4:]), user("next")]
    prompt = client.shorten(sent)
    assert prompt.shift is None
    assert client.text(prompt.token_ids) == client.rendered(sent)


def test_another_system_prompt_or_tenant_or_model_is_another_conversation(client: Dropper):
    whole = client.talk(5, [system("be a cat")])
    sent = [*whole[3:], user("next")]
    assert client.shorten([system("be a cat"), *sent]).shift is not None
    assert client.shorten([system("be a dog"), *sent]).shift is None
    assert client.shorten([system("be a cat"), *sent], model="other").shift is None
    assert client.shorten([system("be a cat"), *sent], tenant="other").shift is None
    assert client.shorten([system("be a cat"), *sent], now=client.now + 4000).shift is None  # its time is over


def test_an_endless_conversation_is_begun_anew(client: Dropper, monkeypatch: pytest.MonkeyPatch):
    whole = client.talk(5, [])
    monkeypatch.setattr(reprise.app.conversations.transcripts, "MAX_STREAM_TOKENS", 200)
    assert client.shorten([*whole[2:], user("next")]).shift is None


def test_an_answer_that_the_template_shows_in_part_is_computed():
    """The ids would say something else than the client's messages."""
    client = Dropper(in_memory(), template=STRIPS_THINKING)
    messages: list[dict] = []
    for turn in range(5):
        messages.append(user(f"say it {turn} times " + "and on " * 20))
        prompt = client.ask(messages)
        generated = client.ids("<think>the cat is a cat</think> so", " the cat" * 20, "<|im_end|>")
        messages.append(client.answer(prompt, generated))
    assert client.shorten([*messages[2:], user("next")]).shift is None


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_dropping_gives_the_rendered_text(data: st.DataObject):
    client = Dropper(in_memory())
    lead = data.draw(st.sampled_from([[], [system("be a cat")]]))
    whole = client.talk(3, lead)
    for _ in range(4):
        whole.append(user(data.draw(st.sampled_from(["go on", "<|im_end|>", "the cat " * 30]))))
        dropped = data.draw(st.integers(0, len(whole) - len(lead) - 1))
        sent = [*lead, *whole[len(lead) + dropped :]]
        prompt = client.shorten(sent, session_id=data.draw(st.sampled_from([None, "s"])))
        assert client.text(prompt.token_ids) == client.rendered(sent)
        if prompt.shift is not None:
            check(client, prompt, sent)
        assert client.by_message(prompt) == turns_of(sent)
        whole.append(client.answer(prompt, client.ids(*ODD_SPLIT, " the hat" * 30, "<|im_end|>")))
