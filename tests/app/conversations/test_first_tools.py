import asyncio
import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reprise.app.conversations.first_tools import FirstTools
from reprise.app.conversations.offered import MAX_LIST_BYTES, Offered
from reprise.app.conversations.text_thread import TextThread
from reprise.app.conversations.transcripts import Transcripts
from tests.app.conversations.test_transcripts import Client, assistant, in_memory, user


def tool(name: str, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "Where."}}, **fields}
    return {"type": "function", "function": {"name": name, "description": f"Do {name}.", "parameters": parameters}}


TOOLS = [tool("read"), tool("write", required=["path"])]
SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffled(value[name], rng) for name in names}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


async def nothing(key: bytes) -> None:
    return None


def first_seen(memory: FirstTools, tools: list, tenant: str = "t") -> Offered:
    return asyncio.run(memory.first_seen(tenant, tools, nothing))


@given(value=st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=4), min_size=1, max_size=3), rng=st.randoms())
def test_equal_json_is_written_as_it_came_first(value: list, rng: random.Random) -> None:
    memory = FirstTools()
    first = first_seen(memory, value)
    again = first_seen(memory, shuffled(value, rng))
    assert json.dumps(again.tools) == json.dumps(first.tools) == json.dumps(value)
    assert again.key == first.key


def test_what_is_not_equal_as_json_stays_as_it_came() -> None:
    memory = FirstTools()
    lists = [[{"minimum": value}] for value in (1, 1.0, True, "1", None)] + [[{}], [{"minimum": []}]]
    assert [json.dumps(first_seen(memory, tools).tools) for tools in lists] == [json.dumps(tools) for tools in lists]
    assert first_seen(memory, list(reversed(TOOLS))).tools == list(reversed(TOOLS))


def test_a_tenant_does_not_see_the_order_of_another() -> None:
    memory, other = FirstTools(), shuffled(TOOLS, random.Random(1))
    assert json.dumps(first_seen(memory, TOOLS, "a").tools) == json.dumps(TOOLS)
    assert json.dumps(first_seen(memory, other, "b").tools) == json.dumps(other) != json.dumps(TOOLS)


def test_the_memory_is_bounded() -> None:
    memory = FirstTools(max_bytes=10_000)
    for number in range(100):
        first_seen(memory, [tool(f"f{number}")])
        assert 0 < memory.num_bytes <= 10_000
    first_seen(memory, [tool("f", description="x" * MAX_LIST_BYTES)])
    assert memory.num_bytes <= 10_000


async def ask(text: TextThread, client: Client, tools: list, messages: list) -> Any:
    offered = await text.first_seen(tools, tenant=client.tenant)
    return await text.prepare(
        tokenizer=client.tokenizer, tenant=client.tenant, model="m", messages=messages, tools=offered.tools,
        template_args={}, session_id=None, now=1000.0, offered=offered,
    )  # fmt: skip


def test_the_ids_are_the_same_whatever_the_order_of_keys_and_after_a_restart(tmp_path) -> None:
    def opened() -> Transcripts:
        return in_memory(path=tmp_path / "transcripts.sqlite3")

    async def talk() -> None:
        rng = random.Random(0)
        client = Client(opened(), template=SHOWS_TOOLS)
        text = TextThread(client.transcripts)
        prompt = await ask(text, client, TOOLS, [user("hello")])
        assert (await ask(text, client, shuffled(TOOLS, rng), [user("hello")])).token_ids == prompt.token_ids
        generated = client.ids("c", "a", "t")
        client.answer(prompt, generated)
        await text.close()
        client.transcripts = opened()
        text = TextThread(client.transcripts)
        messages = [user("hello"), assistant("cat"), user("more")]
        following = await ask(text, client, shuffled(TOOLS, rng), messages)
        kept = prompt.token_ids + generated
        assert following.token_ids[: len(kept)] == kept
        assert following.spliced_tokens == len(kept)
        assert following.diverged is None
        client.transcripts.forget(following.session_id)
        offered = await text.first_seen(TOOLS, tenant=client.tenant)
        assert client.transcripts.tools(offered.key) is None, "it leaves with the last session that had it"
        await text.close()

    asyncio.run(talk())
