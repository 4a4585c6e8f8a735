import functools
import json
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.conversations.transcripts import Transcripts
from reprise.app.text.tokenizer import SHIELD, ChatTokenizer, PromptTooLong
from tests.app.text.test_tokenizer import saved, sentencepiece_like
from tests.example_counts import examples
from tools.bundled_model.corpus import CHAT_TEMPLATE, SPECIAL_TOKENS

END = 2  # <|im_end|>
SENTENCES = [
    "the cat and the hat sat on the mat and the other cat had the other hat, said the cat",
    "caching the cache catches the cached cat; über naïve 東京 and 🙂🙃 go on and on",
    "user asks, assistant answers, system says\nand so the conversation goes on and on",
    "<think>the cat is a cat</think> so the answer is the cat",
]
HEAD = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
STRIPS_THINKING = (
    "{% for m in messages %}{% set c = m['content'] or '' %}" + HEAD + "{% if m['role'] == 'assistant' %}"
    "{{ c.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ c }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool>' + call | tojson + '</tool>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"
    "{% if no_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
TRIMS = (
    "{% for m in messages %}" + HEAD + "{{ m['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
COUNTS = "{{ messages | length }} messages\n" + CHAT_TEMPLATE  # every turn changes how the conversation begins
SHOUTS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper")


@functools.cache
def vocabulary() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer.to_str()


@functools.cache
def tokenizer_with(template: str) -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(vocabulary(), encoding="utf-8")
        (Path(directory) / "chat_template.jinja").write_text(template, encoding="utf-8")
        return ChatTokenizer.load(Path(directory))


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


@dataclass
class Client:
    """Talks to Transcripts as the server does."""

    transcripts: Transcripts
    template: str = CHAT_TEMPLATE
    tenant: str = "tenant"
    scope: dict = field(default_factory=lambda: {"model": "m", "tools": None, "template_args": {}})
    now: float = 1000.0

    @property
    def tokenizer(self) -> ChatTokenizer:
        return tokenizer_with(self.template)

    def ask(self, messages: list[dict], session_id: str | None = None) -> PreparedPrompt:
        return self.transcripts.prepare(
            tokenizer=self.tokenizer, tenant=self.tenant, messages=messages, session_id=session_id, now=self.now,
            **self.scope,
        )  # fmt: skip

    def answer(
        self, prompt: PreparedPrompt, ids: Sequence[int], stop: str | None = None, message: dict | None = None
    ) -> dict:
        """Record `ids` as the answer, its text cut where `stop` begins. The message as the client gets it."""
        detokenizer = self.tokenizer.detokenizer()
        text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        text = text.partition(stop)[0] if stop else text
        message = message if message is not None else assistant(text)
        self.transcripts.record(
            prompt, answer=message, token_ids=ids, text=text, text_ends=detokenizer.text_ends, now=self.now
        )
        return message

    def ids(self, *pieces: str) -> list[int]:
        """The ids of every piece by itself: the way to a split that encoding the whole would not choose."""
        return [token_id for piece in pieces for token_id in self.tokenizer.encode(piece)]

    def rendered(self, messages: list[dict]) -> str:
        text = self.tokenizer.render(
            messages, tools=self.scope["tools"], template_args=self.scope["template_args"], add_generation_prompt=True
        )
        return text.replace(SHIELD, "")  # the shield only says where text is not a special token

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def by_message(self, prompt: PreparedPrompt) -> list[str]:
        """The text of every message with its header and its end, and what opens the answer."""
        ends = [*prompt.starts[1:], len(prompt.token_ids)]
        return [self.text(prompt.token_ids[start:end]) for start, end in zip(prompt.starts, ends, strict=True)]


def turns_of(messages: list[dict]) -> list[str]:
    """Render messages as CHAT_TEMPLATE does."""
    said = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return [*said, "<|im_start|>assistant\n"]


def in_memory(**limits) -> Transcripts:
    return Transcripts(**{"path": None, "max_bytes": 64 << 20, "ttl_s": 3600.0, "max_answers_per_prompt": 8, **limits})


@pytest.fixture
def client() -> Client:
    return Client(in_memory())


ODD_SPLIT = ("c", "a", "che", "s the c", "at")


# What is spliced


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(("caches the cat", "<|im_end|>"), id="canonical"),
        pytest.param((*ODD_SPLIT, "<|im_end|>"), id="another split"),
        pytest.param(ODD_SPLIT, id="ended by max_tokens"),
        pytest.param((*ODD_SPLIT, "<|im_end|>", "<|endoftext|>"), id="two ends"),
        pytest.param(("the cat", " \n\n"), id="white space"),
        pytest.param(("<|im_end|>",), id="nothing"),
    ],
)
def test_the_next_turn_keeps_the_ids_of_prompt_and_answer(client, ids):
    messages = [system("be a cat"), user("hello")]
    prompt = client.ask(messages)
    generated = client.ids(*ids)
    answer = client.answer(prompt, generated)
    messages += [answer, user("and then?")]
    following = client.ask(messages)
    visible = [token_id for token_id in generated if token_id > END]
    kept = prompt.token_ids + visible
    assert following.token_ids[: len(kept)] == kept
    assert following.spliced_tokens == len(kept)
    assert client.text(following.token_ids) == client.rendered(messages)
    assert following.session_id == prompt.session_id
    assert following.token_ids.count(END) == 4  # one for each message: the answer's own end is not there twice


def test_the_split_is_one_that_encoding_would_not_give(client):
    messages = [user("hello")]
    messages += [client.answer(client.ask(messages), client.ids(*ODD_SPLIT)), user("and then?")]
    assert client.ask(messages).token_ids != client.tokenizer.encode(client.rendered(messages))


def test_an_answer_cut_inside_a_character(client):
    messages = [user("hello")]
    prompt = client.ask(messages)
    generated = client.ids("the cat", "\U00010348")[:-2]
    answer = client.answer(prompt, generated)
    assert answer["content"] == "the cat\ufffd"
    messages += [answer, user("what?")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(generated)
    assert client.text(following.token_ids) == client.rendered(messages)


@pytest.mark.parametrize("characters", range(1, len("caches the cat")))
def test_the_stop_button_keeps_the_whole_tokens(client, characters):
    messages = [user("hello")]
    prompt = client.ask(messages)
    generated = client.ids(*ODD_SPLIT)
    answer = client.answer(prompt, generated)
    stopped = assistant(answer["content"][:characters])
    messages += [stopped, user("go on")]
    following = client.ask(messages)
    tokens = following.spliced_tokens - len(prompt.token_ids)
    kept = client.text(generated[:tokens])
    assert stopped["content"].startswith(kept)
    assert not stopped["content"].startswith(client.text(generated[: tokens + 1]))
    assert following.token_ids[: following.spliced_tokens] == prompt.token_ids + generated[:tokens]
    assert client.text(following.token_ids) == client.rendered(messages)
    assert following.session_id == prompt.session_id


def test_the_stop_button_in_front_of_a_character_of_several_tokens(client):
    messages = [user("hello")]
    prompt = client.ask(messages)
    generated = client.ids("the cat", "\U00010348", "!")
    client.answer(prompt, generated)
    messages += [assistant("the cat"), user("go on")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(client.ids("the cat"))
    assert client.text(following.token_ids) == client.rendered(messages)


def test_a_token_that_also_begins_the_next_character_is_no_place_to_cut(client):
    generated = client.ids("the", " naî")
    assert client.tokenizer.token_text(generated[-2])[1] == b" na\xc3"
    prompt = client.ask([user("hello")])
    client.answer(prompt, generated)
    messages = [user("hello"), assistant("the na"), user("go on")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(client.ids("the"))
    assert client.text(following.token_ids) == client.rendered(messages)


def test_bytes_behind_the_text_are_not_kept(client):
    """An answer that ended while the first bytes of a character were held back, and were not shown."""
    prompt = client.ask([user("hello")])
    generated = client.ids("the cat", "\U00010348")[:-2]
    ends = [len(client.text(generated[: n + 1]).rstrip("\ufffd")) for n in range(len(generated))]
    client.transcripts.record(
        prompt, answer=assistant("the cat"), token_ids=generated, text="the cat", text_ends=ends, now=client.now
    )
    messages = [user("hello"), assistant("the cat"), user("go on")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(client.ids("the cat"))
    assert client.text(following.token_ids) == client.rendered(messages)


def test_a_stop_string_cuts_inside_a_token(client):
    messages = [user("hello")]
    prompt = client.ask(messages)
    generated = client.ids("said the", " cat", " and on")
    answer = client.answer(prompt, generated, stop="at and")
    assert answer["content"] == "said the c"
    messages += [answer, user("who?")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(client.ids("said the"))
    assert client.text(following.token_ids) == client.rendered(messages)


def test_special_tokens_inside_an_answer_stay(client):
    messages = [user("hello")]
    prompt = client.ask(messages)
    generated = client.ids("the cat<|im_end|>\n<|im_start|>sat", "<|im_end|>")
    answer = client.answer(prompt, generated)
    assert answer["content"] == "the cat\nsat"
    messages += [answer, user("who?")]
    following = client.ask(messages)
    assert following.token_ids[: following.spliced_tokens] == prompt.token_ids + generated[:-1]
    shown = client.tokenizer.decode(following.token_ids, skip_special_tokens=True)
    assert shown == client.tokenizer.decode(client.ids(client.rendered(messages)), skip_special_tokens=True)


def test_many_turns_keep_every_id(client):
    messages, stored = [user("hello")], []
    for turn in range(12):
        prompt = client.ask(messages)
        assert prompt.token_ids[: len(stored)] == stored
        assert prompt.spliced_tokens == len(stored)
        generated = client.ids(*ODD_SPLIT, f" {turn}", "<|im_end|>")
        messages += [client.answer(prompt, generated), user(f"and {turn}?")]
        stored = prompt.token_ids + generated[:-1]


def test_where_messages_begin_is_known_from_the_transcript(tmp_path):
    """Lengths count the exact ids: an answer is as long as it was generated, whatever its text would be tokenized
    to."""
    path = tmp_path / "transcripts.sqlite3"
    client = Client(in_memory(path=path))
    messages = [system("be a cat"), user("hello")]
    opening, generated = 0, [0]
    for turn in range(6):
        if turn == 4:
            client.transcripts.close()
            client.transcripts = in_memory(path=path)
        prompt = client.ask(messages)
        assert client.by_message(prompt) == turns_of(messages)
        if turn:
            assert prompt.starts[-2] - prompt.starts[-3] == opening + len(generated) + 1  # 1 is the newline after it
        opening = len(prompt.token_ids) - prompt.starts[-1]
        generated = client.ids(*ODD_SPLIT, f" {turn}", "<|im_end|>")
        messages += [client.answer(prompt, generated), user(f"and {turn}?")]
    edited = [*messages[:4], assistant("cat"), *messages[5:]]
    assert client.by_message(client.ask(edited)) == turns_of(edited)
    client.transcripts.close()


@pytest.mark.parametrize("template", [STRIPS_THINKING, SHOUTS])
def test_starts_are_in_order_or_absent(template):
    client = Client(in_memory(), template=template)
    messages = [user("hello")]
    for turn in range(3):
        prompt = client.ask(messages)
        assert list(prompt.starts) == sorted(prompt.starts)
        assert len(prompt.starts) == (len(messages) + 1 if template == STRIPS_THINKING else 0)
        thought = "<think>the cat</think> so"
        messages += [client.answer(prompt, client.ids(thought, "<|im_end|>")), user(f"and {turn}?")]


# Which answer


def test_every_answer_of_a_prompt_can_be_gone_on_from(client):
    prompt = client.ask([user("hello")])
    generated = [client.ids("the c", "at", f" {n}") for n in range(3)]
    answers = [client.answer(prompt, ids) for ids in generated]
    for answer, ids in zip(answers, generated, strict=True):
        following = client.ask([user("hello"), answer, user("more")])
        assert following.token_ids[: following.spliced_tokens] == prompt.token_ids + ids
        assert following.session_id == prompt.session_id


def test_answers_of_a_prompt_are_capped_and_those_built_on_stay():
    client = Client(in_memory(max_answers_per_prompt=3))
    prompt = client.ask([user("hello")])
    first = client.answer(prompt, client.ids("first"))
    following = client.ask([user("hello"), first, user("more")])
    client.answer(following, client.ids("more"))
    for n in range(5):
        client.answer(prompt, client.ids(f"answer {n}"))
    history = [user("hello"), first, user("more"), assistant("more"), user("still?")]
    assert client.ask(history).spliced_tokens == len(following.token_ids) + len(client.ids("more"))
    known = [
        n for n in range(5)
        if client.ask([user("hello"), assistant(f"answer {n}"), user("x")]).session_id == prompt.session_id
        and client.ask([user("hello"), assistant(f"answer {n}"), user("x")]).spliced_tokens
        == len(prompt.token_ids) + len(client.ids(f"answer {n}"))
    ]  # fmt: skip
    assert known == [3, 4]


def test_the_longest_chain_wins_and_an_edit_forks(client):
    messages = [user("one")]
    for text in ("two", "three", "four"):
        prompt = client.ask(messages)
        messages += [client.answer(prompt, client.ids(*ODD_SPLIT, text)), user(text)]
    session_id = client.ask(messages).session_id
    edited = [*messages[:3], assistant("something else"), *messages[4:]]
    following = client.ask(edited)
    upto = client.ask(messages[:3])
    assert following.spliced_tokens == len(upto.token_ids)
    assert following.token_ids[: len(upto.token_ids)] == upto.token_ids
    assert client.text(following.token_ids) == client.rendered(edited)
    assert following.session_id == session_id
    branch = client.ask([*messages[:2], user("another question")])
    assert (branch.session_id, branch.spliced_tokens) == (session_id, upto.spliced_tokens)


def test_an_edited_answer_keeps_what_stands_in_front_of_the_edit(client):
    prompt = client.ask([user("hello")])
    generated = client.ids("c", "a", "che", " the cat")
    client.answer(prompt, generated)
    messages = [user("hello"), assistant("cache the dog"), user("dog?")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(client.ids("c", "a", "che", " the"))
    assert client.text(following.token_ids) == client.rendered(messages)
    assert following.session_id != prompt.session_id  # the answer sent back is none of ours


def test_the_same_opening_is_not_the_same_conversation(client):
    first, second = client.ask([user("hello")]), client.ask([user("hello")])
    assert first.session_id != second.session_id
    answers = [client.answer(first, client.ids("the cat")), client.answer(second, client.ids("the hat"))]
    found = [client.ask([user("hello"), answer, user("more")]).session_id for answer in answers]
    assert found == [first.session_id, second.session_id]
    foreign = client.ask([user("hello"), assistant("something else"), user("more")])
    assert foreign.session_id not in found


def test_a_given_session_is_used_and_found_by_content_all_the_same(client):
    prompt = client.ask([user("hello")], session_id="mine")
    answer = client.answer(prompt, client.ids(*ODD_SPLIT))
    messages = [user("hello"), answer, user("more")]
    assert client.ask(messages).session_id == "mine"
    other = client.ask(messages, session_id="other")
    assert (other.session_id, other.spliced_tokens) == ("other", len(prompt.token_ids) + len(client.ids(*ODD_SPLIT)))
    generated = client.ids("on", " and", " on")
    messages += [client.answer(other, generated), user("?")]
    client.transcripts.forget("mine")  # what another session went on with does not go with it
    following = client.ask(messages)
    assert following.session_id == "other"
    assert following.spliced_tokens == len(other.token_ids) + len(generated)


def test_a_session_that_is_read_stays(client):
    messages = [user("hello")]
    messages += [client.answer(client.ask(messages), client.ids(*ODD_SPLIT)), user("more")]
    for _ in range(3):  # questions whose answers never came
        client.now += 3000.0
        assert client.ask(messages).spliced_tokens > 0
        assert client.transcripts.sweep(client.now) == 0
    client.now += 3601.0
    assert client.ask(messages).spliced_tokens == 0
    assert client.transcripts.sweep(client.now) == 1


def test_a_session_may_stay_longer_or_shorter(client):
    for name in ("default", "longer", "shorter", "pinned"):
        messages = [user(name)]
        client.answer(client.ask(messages, name), client.ids(*ODD_SPLIT))
    client.transcripts.keep("longer", tenant=client.tenant, ttl_s=10_000.0)
    client.transcripts.keep("shorter", tenant=client.tenant, ttl_s=10.0)
    client.transcripts.keep("pinned", tenant=client.tenant, ttl_s=None)
    client.transcripts.keep("default", tenant="other", ttl_s=None)

    def known() -> set[str]:
        names = ("default", "longer", "shorter", "pinned")
        answer = assistant("".join(ODD_SPLIT))
        return {name for name in names if client.ask([user(name), answer, user("more")]).spliced_tokens}

    for now, left in ((1005.0, 4), (1011.0, 3), (4700.0, 2), (20_000.0, 1), (1e9, 1)):
        client.now = now
        swept = client.transcripts.sweep(now)
        assert swept in (0, 1)
        client.now = 1000.0  # asking is no use that prolongs anything
        assert len(known()) == left
    assert known() == {"pinned"}
    client.transcripts.keep("pinned", tenant=client.tenant, ttl_s=10.0)
    assert client.transcripts.sweep(2e9) == 1


def test_new_session_ids_are_unguessable_and_well_formed(client):
    ids = {client.ask([user("hello")]).session_id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(name) == 31 and name.startswith("sess_") and name[5:].isalnum() and name.islower() for name in ids)


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("change", "reuses"),
    [
        ({}, True),
        ({"tenant": "another"}, False),
        ({"scope": {"model": "n", "tools": None, "template_args": {}}}, False),
        ({"scope": {"model": "m", "tools": TOOLS, "template_args": {}}}, False),
        ({"scope": {"model": "m", "tools": None, "template_args": {"x": True}}}, False),
        ({"template": TRIMS}, False),
    ],
)
def test_nothing_is_shared_across_scopes(client, change, reuses):
    prompt = client.ask([user("hello")])
    answer = client.answer(prompt, client.ids(*ODD_SPLIT))
    other = Client(**{**vars(client), **change})
    following = other.ask([user("hello"), answer, user("more")])
    assert (following.spliced_tokens > 0, following.session_id == prompt.session_id) == (reuses, reuses)


def test_scope_fields_cannot_be_shifted_into_each_other(client):
    def first_chain(tenant, model):
        scope = {"model": model, "tools": None, "template_args": {}}
        return Client(client.transcripts, tenant=tenant, scope=scope).ask([user("hello")]).chain

    assert len({first_chain("ab", "c"), first_chain("a", "bc"), first_chain("abc", ""), first_chain("", "abc")}) == 4


@pytest.mark.parametrize(
    "returned",
    [
        {"refusal": None, "annotations": [], "tool_calls": None, "function_call": None},
        {"cache_control": {"type": "ephemeral"}},
        {"tool_calls": []},
    ],
)
def test_what_clients_add_to_an_answer_does_not_hide_it(client, returned):
    prompt = client.ask([user("hello")])
    generated = client.ids(*ODD_SPLIT)
    answer = client.answer(prompt, generated)
    following = client.ask([user("hello"), {**answer, **returned}, user("more")])
    assert following.spliced_tokens == len(prompt.token_ids) + len(generated)


# Templates that do not render an answer as it is


def test_a_template_that_strips_thinking_keeps_what_was_generated():
    client = Client(in_memory(), template=STRIPS_THINKING)
    messages = [user("hello")]
    kept: list[int] = []
    for _ in range(3):
        prompt = client.ask(messages)
        assert prompt.token_ids[: len(kept)] == kept
        generated = client.ids("<think>the c", "at is</think>", "\n\nthe ", "c", "at", "<|im_end|>")
        messages += [client.answer(prompt, generated), user("more")]
        kept = prompt.token_ids + generated[:-1]
    following = client.ask(messages)
    assert following.spliced_tokens == len(kept)
    assert client.text(following.token_ids[len(kept) :]) == client.rendered([user("more")]).join(["<|im_end|>\n", ""])


def test_reasoning_that_the_client_drops_or_returns():
    for returned in ({}, {"reasoning_content": "the cat is"}):
        client = Client(in_memory(), template=STRIPS_THINKING)
        prompt = client.ask([user("hello")])
        generated = client.ids("<think>the cat is</think>", "\n\nthe ", "c", "at", "<|im_end|>")
        client.answer(prompt, generated, message={**assistant("the cat"), "reasoning_content": "the cat is"})
        following = client.ask([user("hello"), {**assistant("the cat"), **returned}, user("more")])
        assert following.token_ids[: following.spliced_tokens] == prompt.token_ids + generated[:-1]


def test_edited_reasoning_is_not_our_answer():
    client = Client(in_memory(), template=STRIPS_THINKING)
    prompt = client.ask([user("hello")])
    client.answer(
        prompt,
        client.ids("<think>the cat is</think>", "the hat"),
        message={**assistant("the hat"), "reasoning_content": "the cat is"},
    )
    messages = [user("hello"), {**assistant("the hat"), "reasoning_content": "edited"}, user("more")]
    following = client.ask(messages)
    assert client.text(following.token_ids) == client.rendered(messages)


def test_a_thinking_block_that_only_new_prompts_have():
    client = Client(in_memory(), template=STRIPS_THINKING)
    client.scope["template_args"] = {"no_thinking": True}
    messages = [user("hello")]
    kept: list[int] = []
    for n in range(3):
        prompt = client.ask(messages)
        assert client.text(prompt.token_ids).endswith("<think>\n\n</think>\n\n")
        assert prompt.spliced_tokens == len(kept)
        assert prompt.token_ids[: len(kept)] == kept
        generated = client.ids(*ODD_SPLIT, f" {n}")
        messages += [client.answer(prompt, generated), user("more")]
        kept = prompt.token_ids + generated


def test_a_template_that_trims_keeps_what_was_generated():
    client = Client(in_memory(), template=TRIMS)
    prompt = client.ask([user("hello")])
    generated = client.ids("\n ", "c", "at", " \n", "<|im_end|>")
    messages = [user("hello"), client.answer(prompt, generated), user("more")]
    following = client.ask(messages)
    assert following.token_ids[: following.spliced_tokens] == prompt.token_ids + generated[:-1]
    assert client.text(following.token_ids).endswith(" \n<|im_end|>\n" + client.rendered([user("more")]))
    # A client that trims as well sends other text: then the ids are those of that text.
    messages[1] = assistant("cat")
    assert client.text(client.ask(messages).token_ids) == client.rendered(messages)


def test_a_stopped_answer_in_a_template_that_trims():
    client = Client(in_memory(), template=TRIMS)
    prompt = client.ask([user("hello")])
    generated = client.ids("the", " cat", " sat")
    client.answer(prompt, generated)
    messages = [user("hello"), assistant("the cat "), user("more")]
    following = client.ask(messages)
    assert following.spliced_tokens == len(prompt.token_ids) + len(client.ids("the", " cat"))
    assert client.text(following.token_ids) == client.rendered(messages)


def test_a_template_that_says_something_else_because_of_an_answer_is_tokenized_anew():
    note = "{% for m in messages if 'cat' in m['content'] %}[there was a cat]{% endfor %}"
    client = Client(
        in_memory(), template=TRIMS.replace("{{ '<|im_start|>assistant", note + "{{ '<|im_start|>assistant")
    )
    for answer in ("dog ", "cat "):
        prompt = client.ask([user("hello")])
        generated = client.ids(answer[:1], answer[1:])
        messages = [user("hello"), client.answer(prompt, generated), user("more")]
        following = client.ask(messages)
        if answer == "dog ":
            assert following.spliced_tokens == len(prompt.token_ids) + len(generated)
        else:
            assert client.text(following.token_ids) == client.rendered(messages)


@pytest.mark.parametrize("template", [COUNTS, SHOUTS])
def test_a_render_that_is_no_extension_is_tokenized_anew(template):
    client = Client(in_memory(), template=template)
    prompt = client.ask([user("hello")])
    messages = [user("hello"), client.answer(prompt, client.ids(*ODD_SPLIT)), user("more")]
    following = client.ask(messages)
    if template == COUNTS:
        assert following.token_ids == client.tokenizer.encode(client.rendered(messages))
    common = following.spliced_tokens
    assert following.token_ids[:common] == (prompt.token_ids + client.ids(*ODD_SPLIT))[:common]
    assert following.session_id == prompt.session_id


def test_an_earlier_answer_serves_when_the_last_one_renders_differently():
    # Thinking is shown after the last user message only, as in a round of tool calls.
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        + HEAD
        + "{% if loop.index0 > ns.last %}{{ m['content'] }}"
        "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\\n' }}"
    )
    client = Client(in_memory(), template=template)
    messages = [user("hello")]
    for role in ("tool", "tool"):
        prompt = client.ask(messages)
        answer = client.answer(prompt, client.ids("<think>the c", "at</think>", "c", "all"))
        messages += [answer, {"role": role, "content": "result"}]
    prompt = client.ask(messages)
    assert prompt.spliced_tokens > len(client.ids(client.rendered(messages[:2])))
    messages += [client.answer(prompt, client.ids("c", "at")), user("more")]
    following = client.ask(messages)
    first = client.ids(client.rendered([user("hello")]), "<think>the c", "at</think>", "c", "all")
    assert following.token_ids[: len(first)] == first  # the first answer as generated, the later ones as rendered
    assert following.session_id == prompt.session_id


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_tool_calls_keep_their_ids_however_the_template_writes_them(separators):
    client = Client(in_memory(), template=STRIPS_THINKING)
    prompt = client.ask([user("hello")])
    call = {"name": "cat", "arguments": {"hat": 1}}
    generated = client.ids("<tool>", json.dumps(call, separators=separators), "</tool>", "<|im_end|>")
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    client.answer(prompt, generated, message=message)
    messages = [user("hello"), message, {"role": "tool", "content": "on the mat"}]
    following = client.ask(messages)
    assert following.token_ids[: following.spliced_tokens] == prompt.token_ids + generated[:-1]
    assert client.text(following.token_ids).endswith(client.rendered(messages[2:]))
    edited = {**message, "tool_calls": [{**call, "arguments": {"hat": 2}}]}
    messages[1] = edited
    following = client.ask(messages)
    assert client.text(following.token_ids) == client.rendered(messages)


def test_a_vocabulary_with_spaces_in_its_words_gets_none_where_the_tail_begins(tmp_path):
    directory = saved(tmp_path, sentencepiece_like(), chat_template=CHAT_TEMPLATE)
    tokenizer, transcripts = ChatTokenizer.load(directory), in_memory()

    def ask(messages):
        return transcripts.prepare(
            tokenizer=tokenizer, tenant="t", model="m", messages=messages, tools=None, template_args={},
            session_id=None, now=0.0,
        )  # fmt: skip

    prompt = ask([user("hello")])
    generated = [tokenizer._tokenizer.token_to_id(piece) for piece in ("▁the", "▁cat")]
    transcripts.record(
        prompt, answer=assistant("the cat"), token_ids=generated, text="the cat", text_ends=[3, 7], now=0.0
    )
    for content, kept in (("the cat", 2), ("the c", 1), ("the tea", 1)):
        following = ask([user("hello"), assistant(content), user("more")])
        assert following.spliced_tokens == len(prompt.token_ids) + kept
        assert f"{content}<|im_end|>" in tokenizer.decode(following.token_ids, skip_special_tokens=False)


# The property


WORDS = st.sampled_from(
    ["the cat", " hat", "c", "a", "che", "s", "\n", " ", "🙂", "東", "é", "<|im_end|>", "on and on"]
)
TEXT = st.lists(WORDS, max_size=4).map("".join)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_ids_always_decode_to_the_rendered_text_and_never_leave_a_tenant(data):
    transcripts = in_memory(max_answers_per_prompt=data.draw(st.integers(1, 4)))
    tools = st.sampled_from([None, TOOLS])
    clients = [
        Client(transcripts, tenant=tenant, scope={"model": "m", "tools": data.draw(tools), "template_args": {}})
        for tenant in ("a", "b")
    ]
    byte_ids = st.integers(3, clients[0].tokenizer.vocab_size - 1)
    histories: list[list[dict]] = [[]]  # shared by all, so that tenants send the same text
    for _ in range(data.draw(st.integers(2, 7))):
        client = data.draw(st.sampled_from(clients))
        client.now += data.draw(st.sampled_from([0.0, 5.0, 4000.0]))
        messages = list(data.draw(st.sampled_from(histories)))
        for position in range(len(messages)):
            kind = data.draw(st.sampled_from(["keep"] * 8 + ["cut", "edit", "trim"]))
            content = messages[position]["content"]
            if kind == "cut":
                content = content[: data.draw(st.integers(0, len(content)))]
            elif kind == "edit":
                content = data.draw(TEXT)
            elif kind == "trim":
                content = content.strip()
            messages[position] = {**messages[position], "content": content}
        messages.append(user(data.draw(TEXT)))
        prompt = client.ask(messages, session_id=data.draw(st.sampled_from([None, "s", "t"])))
        assert client.text(prompt.token_ids) == client.rendered(messages)
        assert client.by_message(prompt) == turns_of(messages)
        histories.append(messages)
        for _ in range(data.draw(st.integers(1, 3))):
            # Words split in every way, or any bytes at all; ended or not.
            words = data.draw(st.none() | st.lists(WORDS, max_size=5))
            generated = client.ids(*words) if words is not None else data.draw(st.lists(byte_ids, max_size=8))
            generated = [token_id for token_id in generated if token_id > END]
            generated += data.draw(st.sampled_from([[], [END], [END, 0]]))
            if not generated:
                continue
            answer = client.answer(prompt, generated, stop=data.draw(st.sampled_from([None, "a", "at"])))
            histories.append([*messages, answer])


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_another_tenants_split_never_shows(data):
    """Both tenants hold the same conversation, generated in other tokens; each gets its own back."""
    transcripts = in_memory()
    splits = {"a": ("ca", "ching ", "the cat"), "b": ("c", "a", "c", "hing th", "e cat")}
    clients = {tenant: Client(transcripts, tenant=tenant) for tenant in splits}
    kept: dict[str, list[int]] = {tenant: [] for tenant in splits}
    messages = {tenant: [user("hello")] for tenant in splits}
    for tenant in data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=3, max_size=8)):
        client = clients[tenant]
        prompt = client.ask(messages[tenant])
        assert prompt.token_ids[: len(kept[tenant])] == kept[tenant]
        assert prompt.spliced_tokens == len(kept[tenant])
        generated = client.ids(*splits[tenant])
        messages[tenant] = [*messages[tenant], client.answer(prompt, generated), user("more")]
        kept[tenant] = prompt.token_ids + generated


# Cost


def test_a_long_conversation_stays_fast_warm_and_after_a_restart(tmp_path):
    def open_transcripts() -> Transcripts:
        return in_memory(path=tmp_path / "transcripts.sqlite3")

    client = Client(open_transcripts())
    rng = random.Random(0)
    words = " ".join(SENTENCES).split()
    messages = [system("be a cat"), user("hello")]
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        prompt = client.ask(messages)
        middle = time.perf_counter()
        ids = client.ids(" ".join(rng.choices(words, k=40)), "<|im_end|>")
        begun = time.perf_counter()
        messages += [client.answer(prompt, ids), user(" ".join(rng.choices(words, k=20)))]
        seconds.append(middle - start + time.perf_counter() - begun)
    client.transcripts.close()
    client.transcripts = open_transcripts()
    start = time.perf_counter()
    again = client.ask(messages)
    cold = time.perf_counter() - start
    assert again.spliced_tokens == len(prompt.token_ids) + len(ids) - 1
    # A few milliseconds when nothing else runs; the bounds leave room for a busy machine.
    assert sorted(seconds)[90] < 0.05
    assert cold < 0.25
    print(
        f"turn p50 {sorted(seconds)[50] * 1e3:.2f} ms, p90 {sorted(seconds)[90] * 1e3:.2f} ms, cold {cold * 1e3:.2f} ms"
    )


@dataclass
class Halting:
    """A tokenizer that tells when it encodes, and goes on when it may."""

    tokenizer: ChatTokenizer
    begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def encode_marked(self, *args, **kwargs):
        self.begun.set()
        assert self.may_go_on.wait(60)
        return self.tokenizer.encode_marked(*args, **kwargs)


def test_other_calls_go_on_while_a_text_is_tokenized(client):
    first = client.ask([user("the cat")])
    halting = Halting(client.tokenizer)
    asked = {"tokenizer": halting, "tenant": client.tenant, "session_id": None, "now": client.now, **client.scope}
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(client.transcripts.prepare, messages=[user("the hat")], **asked)
        assert halting.begun.wait(60)
        said = client.answer(first, client.ids("the other", " cat"))  # neither may wait for the text under way
        followed = client.ask([user("the cat"), said, user("and")])
        assert not slow.done()
        halting.may_go_on.set()
        assert client.text(slow.result().token_ids) == client.rendered([user("the hat")])
    assert followed.session_id == first.session_id


def test_a_text_that_is_too_long_holds_up_nobody_afterwards(client):
    asked = {"tokenizer": client.tokenizer, "tenant": client.tenant, "session_id": None, "now": client.now}
    with pytest.raises(PromptTooLong):
        client.transcripts.prepare(messages=[user("the cat " * 4000)], max_tokens=10, **asked, **client.scope)
    assert client.text(client.ask([user("the cat")]).token_ids) == client.rendered([user("the cat")])
