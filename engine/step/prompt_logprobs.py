"""Collects the logprobs of prompts' own tokens, for requests that ask for them."""

from collections.abc import Sequence

from torch import Tensor

from reprise.engine.model.batch import BatchItem
from reprise.engine.step.choices import RunningChoice
from reprise.engine.step.sampler import token_logprobs

_LOGPROB_ROWS = 64  # rows of a prompt at a time: 40 MB for a vocabulary of 150k, in fp32


def note_prompts(items: Sequence[BatchItem], choices: Sequence[RunningChoice], logits: Tensor) -> Tensor:
    """Store the logprobs of prompts' tokens in their choices, where requests ask for them. Returns the rows of logits
    from which tokens are drawn: one for each item that wants logits, and one for each token of its draft."""
    row = 0
    drawn: list[int] = []
    for item, choice in zip(items, choices, strict=True):
        if item.prompt_rows:
            assert choice.prompt_logprobs is not None
            place = item.first_row + 1
            for start in range(0, item.prompt_rows, _LOGPROB_ROWS):
                count = min(_LOGPROB_ROWS, item.prompt_rows - start)
                tokens = choice.sequence.token_ids[place + start : place + start + count]
                found = token_logprobs(
                    logits[row + start : row + start + count], tokens, [choice.prompt_logprobs] * count
                )
                choice.prompt_known.update(enumerate(found, place + start))
            row += item.prompt_rows
        last = item.draft_rows + item.wants_logits
        drawn += range(row, row + last)
        row += last
    return logits[drawn]
