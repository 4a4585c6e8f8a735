"""A conversation that outgrows the context window: the oldest messages leave, and the KV of the others stays valid.

    python examples/long_chat.py

Prints for every turn how many tokens its history has in all, how many of them are no longer in the context, and how
many were computed: beyond the window hardly more than before it.
"""

import os
import time
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0]
window = model.max_model_len

# The system prompt stays, whatever leaves.
messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a patient listener."}]
print(f"{model.id} has a window of {window} tokens")
print("turn   tokens  dropped  computed  answered in")
for turn in range(1, 13):
    # A message takes a tenth of the window or more, so twelve of them cannot all stay.
    text = f"This is part {turn} of my story. " + "It rained, and we went on walking. " * (window // 80)
    messages.append({"role": "user", "content": text})
    started = time.perf_counter()
    answer = client.chat.completions.create(
        model=model.id, messages=messages, max_tokens=24, extra_body={"truncation": "auto"}
    )
    took_s = time.perf_counter() - started
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    cache = answer.x_cache  # a field of ours: the client keeps fields that it does not know
    print(
        f"{turn:4} {answer.usage.prompt_tokens:8} {cache['truncated_tokens']:8} {cache['computed_tokens']:9}"
        f"  {took_s:.2f} s"
    )
