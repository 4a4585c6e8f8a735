"""Where every token of a prompt came from, and why the rest was computed: `x_cache` by plain HTTP, no client library.

python examples/read_x_cache.py
"""

import os

import httpx

base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
http = httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=120)
model = http.get(f"{base_url}/models").raise_for_status().json()["data"][0]["id"]

MEANING = {
    "new": "nobody has said it before",
    "diverged": "it comes after an edit",
    "evicted": "it had to make room",
    "expired": "its session was not used for its time to live",
    "last_token": "it is there, but the answer needs its logits",
    "cheaper_to_recompute": "computing it is faster than loading it",
}


def explain(answer: dict) -> None:
    cache = answer["x_cache"]
    print(f"session {cache['session_id']}: {answer['usage']['prompt_tokens']} prompt tokens")
    for tier in ("hbm", "dram", "disk"):
        print(f"  {cache[f'{tier}_tokens']:5} from {tier}")
    print(f"  {cache['computed_tokens']:5} computed, of these")
    for reason, tokens in cache["miss_reasons"].items():
        print(f"        {tokens:5} {reason}: {MEANING.get(reason, 'see docs/api.md')}")
    print(f"  the first word came about {cache['saved_ms'] / 1e3:.2f} s sooner for what was found")


messages = [{"role": "system", "content": "Answer in one sentence."}]
for text in ("What is a cache?", "And what is an eviction?"):
    messages.append({"role": "user", "content": text})
    body = {"model": model, "messages": messages, "max_tokens": 30}
    response = http.post(f"{base_url}/chat/completions", json=body).raise_for_status()
    answer = response.json()
    messages.append(answer["choices"][0]["message"])
    explain(answer)
    print("  the header says it in short:", response.headers["x-cache"])
