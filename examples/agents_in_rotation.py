"""Agents that take turns on one task, each with a conversation of its own that comes back again and again.

    python examples/agents_in_rotation.py

What one agent says goes to the next. Each conversation has a session id, so that it can be looked at, pinned or
deleted by name (see sessions.sh). Where memory is too short for all of them, the server learns the order in which they
come and fetches the next one from disk before it comes.
"""

import os
from typing import Any

from openai import OpenAI

AGENTS = {
    "planner": "You plan. Say what has to be done next.",
    "writer": "You write. Do what the plan says.",
    "critic": "You criticise. Say what is wrong with the text.",
    "editor": "You edit. Mend what the critic has found.",
}
ROUNDS = 3

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
conversations: dict[str, list[dict[str, Any]]] = {
    name: [{"role": "system", "content": role}] for name, role in AGENTS.items()
}

said = "Write a short letter to a friend about the summer."
for round_ in range(1, ROUNDS + 1):
    for name, messages in conversations.items():
        messages.append({"role": "user", "content": said})
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=40, extra_body={"session_id": f"letter-{name}"}
        )
        said = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        cache = answer.x_cache
        sources = ", ".join(f"{cache[f'{tier}_tokens']} {tier}" for tier in ("hbm", "dram", "disk"))
        print(f"round {round_} {name:8} history from: {sources}; {cache['computed_tokens']} computed")
