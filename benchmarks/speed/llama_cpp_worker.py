"""llama.cpp as an arm of `benchmarks.speed.cpu_speed`: `python llama_cpp_worker.py FILE.gguf`.

Runs alone, with a Python that has `llama-cpp-python` and need not have anything of ours. Reads lines of prompts (JSON,
token ids), and answers with [seconds until all have one new token, median seconds of a decode step of all]. With
`--logits TOKENS.npy OUT.npy` it computes the logits of rows of tokens instead, each row from an empty context.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

import llama_cpp

NEW_TOKENS = 33
BATCH = 512
MAX_CONTEXT = 1100
MAX_STREAMS = 8


class Decoder:
    def __init__(self, file: str, *, streams: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), model_parameters)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = streams * context, BATCH, streams
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"{file} cannot be loaded")
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, streams)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows (token, position, stream, whether its logits are wanted), at most BATCH."""
        batch = self._batch
        for place, (token, position, stream, wanted) in enumerate(rows):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0], batch.logits[place] = stream, int(wanted)
        batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self._context)

    def most_likely(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return max(range(self.vocab), key=logits.__getitem__) if self.vocab < 1000 else int(_argmax(logits, self.vocab))

    def logits(self, place: int) -> Any:
        import numpy as np

        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, place), (self.vocab,)).copy()


def _argmax(logits: object, vocab: int) -> int:
    import numpy as np

    return int(np.ctypeslib.as_array(logits, (vocab,)).argmax())


def measure(decoder: Decoder, prompts: list[list[int]]) -> tuple[float, float]:
    decoder.clear()
    rows = [
        (token, place, stream, place == len(prompt) - 1)
        for stream, prompt in enumerate(prompts)
        for place, token in enumerate(prompt)
    ]
    started = time.perf_counter()
    for first in range(0, len(rows), BATCH):
        decoder.run(rows[first : first + BATCH])
    first_s = time.perf_counter() - started
    steps, tokens = [], [prompt[-1] for prompt in prompts]
    for step in range(NEW_TOKENS):
        before = time.perf_counter()
        decoder.run([(token, len(prompts[stream]) + step, stream, True) for stream, token in enumerate(tokens)])
        tokens = [decoder.most_likely(stream) for stream in range(len(prompts))]
        steps.append(time.perf_counter() - before)
    return first_s, statistics.median(steps[1:])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    if "--logits" in sys.argv:
        import numpy as np

        tokens, out = np.load(sys.argv[3]), sys.argv[4]
        decoder = Decoder(sys.argv[1], streams=1, context=tokens.shape[1])
        found = np.empty((*tokens.shape, decoder.vocab), np.float16)
        for number, row in enumerate(tokens.tolist()):
            decoder.clear()
            for first in range(0, len(row), BATCH):
                part = row[first : first + BATCH]
                decoder.run([(token, first + place, 0, True) for place, token in enumerate(part)])
                for place in range(len(part)):
                    found[number, first + place] = decoder.logits(place)
        np.save(out, found)
        return
    decoder = Decoder(sys.argv[1], streams=MAX_STREAMS, context=MAX_CONTEXT)
    answers.write(json.dumps({"weights": os.path.getsize(sys.argv[1])}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(measure(decoder, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
