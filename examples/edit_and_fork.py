"""Editing a message or asking again forks a conversation; nothing before the first difference is computed again.

python examples/edit_and_fork.py
"""

import os
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id


def ask(what: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the answer to its last message; prints what the answer cost."""
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    computed = usage.prompt_tokens - cached
    print(f"{what:28} {usage.prompt_tokens:4} prompt tokens: {cached:4} from the cache, {computed:4} computed")
    return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


first = ask("a first turn", [user("Tell me about the sea. " * 8)])
second = ask("the next turn", [*first, user("And what lives in it?")])

# The same history with another question: a fork. Both branches share what they have in common, and both go on.
fork = ask("another second question", [*first, user("And why is it salty?")])
ask("the first branch goes on", [*second, user("Which of them is the largest?")])
ask("the second branch goes on", [*fork, user("Was it always so?")])

# The same prompt again: all of it is there but the last token, whose logits the first new token is drawn from.
ask("the second turn once more", [*first, user("And what lives in it?")])

# An edit of the first message diverges there: only the words before it are found.
ask(
    "the first message edited",
    [user("Tell me about the sea. " * 7 + "Be brief."), *first[1:], user("And what lives in it?")],
)
