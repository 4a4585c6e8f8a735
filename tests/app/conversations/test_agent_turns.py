"""Tests that the exact ids of an agent's turn are kept, with the thoughts of all its steps, when the turn is over."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app.conversations.test_transcripts import CHAT_TEMPLATE, HEAD, Client, in_memory, system, user
from tests.example_counts import examples

_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_SAID = (
    "{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}{{ '\\n<tool>' + call | tojson + '</tool>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
_OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
_THOUGHT = "{{ '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n\\n' }}"
_IS_LATER = "m['role'] == 'assistant' and loop.index0 > ns.last"

# Thoughts are shown after the last user message alone, as Qwen's templates do: where there are any, or always.
WHERE_ANY = (
    f"{_LAST_USER}{{% for m in messages %}}{HEAD}{{% if {_IS_LATER} and m['reasoning_content'] %}}{_THOUGHT}"
    f"{{% endif %}}{_SAID}{_OPENS}"
)
ALWAYS = f"{_LAST_USER}{{% for m in messages %}}{HEAD}{{% if {_IS_LATER} %}}{_THOUGHT}{{% endif %}}{_SAID}{_OPENS}"
# The tools stand before the last user message, as Mistral's templates have it: the prompt changes truly.
MOVES_TOOLS = WHERE_ANY.replace(HEAD, "{% if loop.index0 == ns.last %}[TOOLS]{% endif %}" + HEAD, 1)


@dataclass
class Agent:
    """An agent's client: it keeps the messages, and sends thoughts back or not."""

    client: Client
    sends_thoughts: bool = True
    forgets_thoughts: bool = False  # when a turn is over
    messages: list[dict] = field(default_factory=lambda: [system("be a cat")])
    kept: list[int] = field(default_factory=list)  # all ids of the conversation, as they were generated

    def asks(self, text: str) -> None:
        self.messages.append(user(text))

    def steps(self, thought: str, content: str, call: str | None = None, result: str = "on the mat") -> int:
        """Take one step: ask, and record an answer in a split that encoding would not choose. Returns how many ids of
        the prompt were kept."""
        prompt = self.client.ask(self.messages)
        assert prompt.token_ids[: len(self.kept)] == self.kept
        said = f"{thought}\n</think>\n\n{content}"
        message: dict = {"role": "assistant", "content": content, "reasoning_content": thought}
        if call is not None:
            message["tool_calls"] = [{"name": call, "arguments": {"hat": 1}}]
            said += "\n<tool>" + json.dumps(message["tool_calls"][0], separators=(",", ":")) + "</tool>"
        pieces = [said[place : place + 3] for place in range(0, len(said), 3)]
        generated = self.client.ids(*pieces, "<|im_end|>")
        self.client.answer(prompt, generated, message=message)
        self.kept = prompt.token_ids + generated[:-1]
        if not self.sends_thoughts:
            del message["reasoning_content"]
        self.messages.append(message)
        if call is not None:
            self.messages.append({"role": "tool", "content": result})
        return prompt.spliced_tokens

    def takes_a_turn(self, text: str) -> None:
        self.asks(text)
        self.steps("the cat is", "", call="look", result="the hat " * 20)
        self.steps("the hat is", "so", call="look", result="the mat " * 20)
        self.steps("the mat is", "", call="sit")
        self.steps("so the cat sat", "the cat sat")
        self.ends_its_turn()

    def ends_its_turn(self) -> None:
        if self.forgets_thoughts:
            self.messages = [
                {name: value for name, value in message.items() if name != "reasoning_content"}
                for message in self.messages
            ]


def agent_of(template: str, client: dict[str, bool] | None = None, **where) -> Agent:
    return Agent(Client(in_memory(**where), template=template), **(client or {}))


CLIENTS = pytest.mark.parametrize(
    "client",
    [{}, {"sends_thoughts": False}, {"forgets_thoughts": True}],
    ids=["returned", "not returned", "returned in their turn"],
)


@CLIENTS
@pytest.mark.parametrize("template", [WHERE_ANY, ALWAYS, CHAT_TEMPLATE], ids=["where any", "always", "never"])
def test_the_next_user_message_keeps_every_step_as_it_was_generated(template: str, client: dict) -> None:
    if template == CHAT_TEMPLATE:
        template = CHAT_TEMPLATE.replace(
            "message['content']", "message['content'] + ((message['tool_calls'] or '') | string)"
        )
    agent = agent_of(template, client)
    for turn in range(3):
        agent.takes_a_turn(f"where {turn}?")
        following = agent.client.ask([*agent.messages, user("and then?")])
        assert following.token_ids[: len(agent.kept)] == agent.kept
        assert following.spliced_tokens == len(agent.kept)
        rest = agent.client.text(following.token_ids[len(agent.kept) :])
        assert rest.startswith("<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n")
        assert following.diverged is None


@CLIENTS
@pytest.mark.parametrize("template", [WHERE_ANY, ALWAYS], ids=["where any", "always"])
def test_a_restart_loses_nothing_of_it(tmp_path, template: str, client: dict) -> None:
    path = tmp_path / "transcripts.sqlite3"
    agent = agent_of(template, client, path=path)
    agent.takes_a_turn("where?")
    agent.client.transcripts.close()
    agent.client.transcripts = in_memory(path=path)
    agent.takes_a_turn("and then?")  # asserts at every step that all ids are there
    agent.client.transcripts.close()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, {"role": "tool", "content": "another hat"}),
        (5, {"role": "tool", "content": "another mat"}),
        (1, user("where else?")),
        (0, system("be a hat")),
    ],
)
def test_a_change_in_the_past_still_diverges_there(index: int, message: dict) -> None:
    agent = agent_of(WHERE_ANY)
    agent.takes_a_turn("where?")
    before = agent.client.ask([*agent.messages, user("and?")])
    agent.messages[index] = message
    messages = [*agent.messages, user("and?")]
    prompt = agent.client.ask(messages)
    shown = agent.client.by_message(prompt)
    assert shown[index] == f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    common = next(n for n, (a, b) in enumerate(zip(prompt.token_ids, before.token_ids, strict=False)) if a != b)
    assert before.starts[index] < common < before.starts[index + 1]
    assert prompt.diverged is not None
    assert (prompt.diverged.message, prompt.diverged.token) == (index, common)


def test_where_the_template_changes_the_prompt_truly_it_is_computed_from_there() -> None:
    agent = agent_of(MOVES_TOOLS)
    agent.takes_a_turn("where?")
    messages = [*agent.messages, user("and then?")]
    prompt = agent.client.ask(messages)
    assert agent.client.text(prompt.token_ids) == agent.client.rendered(messages)
    assert prompt.diverged is not None
    assert prompt.diverged.where in ("template", "reasoning_content")


def test_an_edited_last_answer_keeps_the_steps_before_it() -> None:
    agent = agent_of(WHERE_ANY)
    agent.takes_a_turn("where?")
    final = agent.kept
    agent.messages[-1] = {**agent.messages[-1], "content": "the cat ran"}
    prompt = agent.client.ask([*agent.messages, user("and then?")])
    steps = agent.client.text(final).rpartition("<|im_start|>assistant\n")[0]
    assert agent.client.text(prompt.token_ids).startswith(steps)
    assert "the cat ran<|im_end|>\n<|im_start|>user\nand then?" in agent.client.text(prompt.token_ids)


WORDS = st.lists(st.sampled_from(["the cat", " hat", "c", "a", "🙂", "東", "é", "\n", " on"]), max_size=4).map("".join)
STEP = st.tuples(WORDS, WORDS, st.sampled_from([None, "look", "sit"]))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    template=st.sampled_from([WHERE_ANY, ALWAYS]),
    client=st.sampled_from([{}, {"sends_thoughts": False}, {"forgets_thoughts": True}]),
    turns=st.lists(st.lists(STEP, min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_kept_ids_say_what_was_said(template: str, client: dict, turns: list) -> None:
    """Check, whatever an agent says in its steps, that without the thoughts the ids decode to the messages as they are
    rendered now, and that each message begins where the prompt says."""
    agent = agent_of(template, client)
    for number, steps in enumerate(turns):
        agent.asks(f"question {number}")
        for thought, content, call in steps:
            agent.steps(thought, content, call)
        if agent.messages[-1]["role"] == "tool":
            agent.steps("", "done")
        agent.ends_its_turn()
    messages = [*agent.messages, user("and?")]
    prompt = agent.client.ask(messages)
    assert prompt.token_ids[: len(agent.kept)] == agent.kept
    assert bare(agent.client.text(prompt.token_ids)) == bare(agent.client.rendered(messages))
    if prompt.starts:
        roles = [text.removeprefix("<|im_start|>").partition("\n")[0] for text in agent.client.by_message(prompt)]
        assert roles == [*(message["role"] for message in messages), "assistant"]


def bare(text: str) -> str:
    """Leave out thoughts, and the white space in calls."""
    parts = text.split("<think>\n")
    shown = parts[0] + "".join(part.partition("\n</think>\n\n")[2] for part in parts[1:])
    return _compact(shown)


def _compact(text: str) -> str:
    pieces = text.split("<tool>")
    calls: list[str] = []
    for piece in pieces[1:]:
        call, _, after = piece.partition("</tool>")
        calls.append(f"<tool>{json.dumps(json.loads(call))}</tool>{after}")
    return "".join([pieces[0], *calls])
