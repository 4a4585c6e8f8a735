"""A chat in the terminal: answers are streamed, and each says how much of its prompt came from the cache.

    python examples/chat.py            # Ctrl-D ends it

Speaks to the server at OPENAI_BASE_URL, or to http://127.0.0.1:8000/v1, with the first model that it serves.
"""

import os
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages: list[dict[str, Any]] = []

while True:
    try:
        messages.append({"role": "user", "content": input("you: ")})
    except EOFError:
        break
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=200, stream=True, stream_options={"include_usage": True}
    )
    answer, usage = "", None
    print(f"{model}: ", end="")
    for chunk in stream:
        if chunk.choices:
            piece = chunk.choices[0].delta.content or ""
            answer += piece
            print(piece, end="", flush=True)
        usage = chunk.usage or usage
    # The whole history goes with every turn, as clients are used to; the server recognises it.
    messages.append({"role": "assistant", "content": answer})
    print(f"\n   ({usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache)")
