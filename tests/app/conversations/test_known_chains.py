import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from reprise.app.conversations.digests import link
from reprise.app.conversations.known_chains import RecentChains

SCOPE = b"s" * 16
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(["", "a", "b"])}),
    min_size=1,
    max_size=6,
)


def chain_of(messages: list[dict], scope: bytes = SCOPE) -> list[bytes]:
    chain = [scope]
    for message in messages:
        chain.append(link(chain[-1], message))
    return chain


def user(content: str) -> dict:
    return {"role": "user", "content": content}


@given(
    lists=st.lists(st.tuples(st.sampled_from([SCOPE, b"t" * 16]), MESSAGES), max_size=12),
    max_bytes=st.integers(0, 6000),
)
def test_what_is_taken_is_what_computing_it_gives(lists, max_bytes):
    recent = RecentChains(max_bytes=max_bytes)
    for scope, messages in lists:
        for turn in range(len(messages)):
            known = recent.take(scope, messages, turn)
            assert known in (None, chain_of(messages[:turn], scope))
        recent.add(messages, chain_of(messages, scope), 0)
        assert recent.num_bytes <= max_bytes


def test_the_next_turn_is_recognised_once():
    recent = RecentChains(max_bytes=10_000)
    messages = [user("a"), user("b")]
    recent.add(messages, chain_of(messages), 0)
    longer = [user("a"), user("b"), user("c")]
    assert recent.take(SCOPE, longer, 1) is None
    assert recent.take(b"t" * 16, longer, 2) is None
    assert recent.take(SCOPE, [user("x"), user("b")], 2) is None
    assert recent.take(SCOPE, longer, 2) == chain_of(messages)
    assert recent.take(SCOPE, longer, 2) is None
    assert recent.num_bytes == 0


def test_values_that_are_no_strings_are_not_known():
    # True == 1, but their digests differ.
    recent = RecentChains(max_bytes=10_000)
    messages = [{"role": "user", "content": "a", "strict": 1}]
    recent.add(messages, chain_of(messages), 0)
    assert recent.take(SCOPE, [{"role": "user", "content": "a", "strict": True}, user("b")], 1) is None


def test_the_longest_unused_leave_first():
    recent = RecentChains(max_bytes=2000)
    for text in ("first", "second", "third"):
        recent.add([user(text)], chain_of([user(text)]), 0)
    assert recent.take(SCOPE, [user("first"), user("x")], 1) is None
    assert recent.take(SCOPE, [user("third"), user("x")], 1) == chain_of([user("third")])


def test_many_short_conversations_take_no_more_memory_than_was_said():
    recent = RecentChains(max_bytes=1 << 20)
    tracemalloc.start()
    for number in range(5000):
        messages = [{"role": "".join(["us", "er"]), "content": f"question {number}"} for _ in range(2)]
        recent.add(messages, chain_of(messages), 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= 1.25 * (1 << 20)
