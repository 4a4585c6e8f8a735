"""One text's KV, computed by the engine's own runner, changed, and scored by what the model says next."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from reprise.engine.build.model import find_attention
from reprise.engine.codec.quality import HistoryCoder, Quality, Subject, compared
from reprise.engine.model.loading import load_model

CPU = torch.device("cpu")
Rows = list[tuple[Tensor, Tensor]]
"""Each layer's K without position [tokens, kv_heads, k_dim] and V [tokens, kv_heads, v_dim]."""


def load_subject(model: Path, dtype: torch.dtype = torch.bfloat16, threads: int | None = None) -> Subject:
    """Load a model on the CPU. dtype: in which KV is stored; it is computed in fp32. threads: number of torch's
    threads; None: as many as by default."""
    if threads:
        torch.set_num_threads(threads)
    module = load_model(model, dtype, CPU)
    return Subject(module, *find_attention(module, CPU))


class History:
    """The KV of one text, after which tokens can be scored. One call at a time. `compute` makes the KV of a text,
    `place` replaces it by other KV, and `score` leaves it as it is."""

    def __init__(self, subject: Subject, *, most_tokens: int) -> None:
        self._coder = HistoryCoder(subject, most_tokens=most_tokens)
        self.length = 0

    def compute(self, token_ids: Tensor | Sequence[int]) -> Rows:
        """Compute the KV of a text, in place of the present history. Returns it as it is stored."""
        self.length = len(token_ids)
        return self._coder.compute(torch.as_tensor(token_ids))

    def place(self, rows: Rows) -> None:
        """Make this KV the whole history, from position 0 on."""
        self.length = len(rows[0][0])
        if self.length:
            self._coder.place(rows)

    def go_on(self, token_ids: Tensor) -> tuple[Tensor, Rows]:
        """Compute more tokens and add them to the history. Returns the log probabilities of the next token after each
        of them [tokens, vocab], and their KV."""
        logprobs, rows = self._coder.go_on(token_ids, self.length)
        self.length += len(token_ids)
        return logprobs, rows

    def score(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Return the log probabilities of the next token after each of these tokens [tokens, vocab]. The tokens follow
        the history and are not added to it."""
        return self._coder.score(torch.as_tensor(token_ids), self.length)

    def quality(self, raw: Tensor, token_ids: Tensor, refused: float = 0.0) -> Quality:
        """Score tokens after the history and compare the log probabilities with `raw`, those after another history."""
        return compared(raw, self.score(token_ids), token_ids, refused)


def summary(parts: Sequence[Quality]) -> dict[str, float]:
    """Return the means of what a change of the history did to the scored tokens of some texts. The errors in the result
    are standard errors."""
    quality = Quality.added(parts)
    change, error = quality.perplexity_change()
    spread = float(quality.divergence.std()) / sqrt(len(quality.divergence))
    return {
        "kl": quality.mean_divergence, "kl_error": spread, "kl_p99": float(quality.divergence.quantile(0.99)),
        "same_choice": quality.same_choices, "perplexity_change": change, "perplexity_error": error,
    }  # fmt: skip
