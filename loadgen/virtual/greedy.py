"""Defines the sampling parameters of a virtual request, of which only the length matters."""

from reprise.scheduler.sequence import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, logit_bias={}, seed=0, max_tokens=max_tokens, min_tokens=0, stop_token_ids=(),
        ignore_eos=True, logprobs=None,
    )  # fmt: skip
