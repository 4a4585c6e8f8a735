"""What transformers' own `generate` does with the same weights: a prompt, and tokens behind it."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_day.section import Asked, asked, seconds, wait


def measure(wanted: Asked) -> dict[str, Any]:
    directory, device = wanted.made_model(), wanted.device
    started = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="sdpa", device_map=device
    )
    wait(device)
    result: dict[str, Any] = {"loaded in s": round(time.monotonic() - started, 1)}
    contexts, new_tokens = ((1024, 4096), 32) if wanted.on_gpu else ((32,), 4)
    for context in contexts:
        for streams in (1, 8, 32) if wanted.on_gpu and context == contexts[0] else (1,):
            ids = torch.randint(3, model.config.vocab_size, (streams, context), device=device)

            def answer(tokens: int, ids: torch.Tensor = ids) -> None:
                model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

            with torch.no_grad():
                first_s = seconds(lambda: answer(1), device, 3)
                all_s = seconds(lambda: answer(new_tokens + 1), device, 3)
            result[f"{streams} x {context}"] = {
                "prompt and first token ms": round(1e3 * first_s, 2),
                "ms a token": round(1e3 * (all_s - first_s) / new_tokens, 3),
            }
            wanted.write(result)
    return result


if __name__ == "__main__":
    request = asked()
    request.write(measure(request))
