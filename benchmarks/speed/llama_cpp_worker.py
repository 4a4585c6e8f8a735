"""Logits of llama.cpp: `python llama_cpp_worker.py FILE.gguf --logits TOKENS.npy OUT.npy`.

Runs alone, with a Python that has `llama-cpp-python` and need not have anything of ours. Computes the logits of rows of
tokens, each row from an empty context.
"""

import os
import sys

import llama_cpp
import numpy as np

BATCH = 512


class Decoder:
    """A llama.cpp model that computes one row of tokens at a time."""

    def __init__(self, file: str, context: int) -> None:
        llama_cpp.llama_backend_init()
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), model_parameters)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch = context, BATCH
        parameters.n_threads = parameters.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"{file} cannot be loaded")
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def logits(self, row: list[int], out: np.ndarray) -> None:
        """Compute a row of tokens from an empty context. out [tokens, vocab] gets the logits after each token. Raises
        RuntimeError."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = self._batch
        for first in range(0, len(row), BATCH):
            part = row[first : first + BATCH]
            for place, token in enumerate(part):
                batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, first + place, 1
                batch.seq_id[place][0], batch.logits[place] = 0, 1
            batch.n_tokens = len(part)
            if llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            llama_cpp.llama_synchronize(self._context)
            for place in range(len(part)):
                found = llama_cpp.llama_get_logits_ith(self._context, place)
                out[first + place] = np.ctypeslib.as_array(found, (self.vocab,))


def main() -> None:
    file, _, tokens_file, out_file = sys.argv[1:]
    tokens = np.load(tokens_file)
    decoder = Decoder(file, tokens.shape[1])
    found = np.empty((*tokens.shape, decoder.vocab), np.float16)
    for number, row in enumerate(tokens.tolist()):
        decoder.logits(row, found[number])
    np.save(out_file, found)


if __name__ == "__main__":
    main()
