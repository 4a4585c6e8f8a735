"""Estimates how long a prompt takes, and how much longer if nothing of it had been cached."""

from reprise.scheduler.budgets.budget import StepCost, StepWork


def reuse_s(cost: StepCost, *, prompt_tokens: int, cached_tokens: int, step_tokens: int) -> float:
    """Return how many seconds later a prompt's first token would have come if its first `cached_tokens`, which were
    found in the cache, had been computed. step_tokens: the most tokens that a step computes, at least 1. Loading the
    found tokens is not deducted.

    `cost` learns from the same steps as `reprise.cache.rates.Rates`, by which the cache chooses between loading and
    computing, and has the same prior. The cache models seconds as linear in tokens, which is enough to compare two ways
    to the same prefix. But attention makes a prompt's later tokens dearer than its first ones: 8,000 tokens cost more
    than twenty times 400. So this adds up the pairs of tokens that attend to each other, as the scheduler does.

    Assumes that the request is alone: that its prompt fills whole steps, beside which nothing decodes. On a busy
    machine reuse saves more. Assumes that weights and KV are where the latest steps had them.
    """
    return max(
        0.0,
        prompt_s(cost, prompt_tokens, 0, step_tokens=step_tokens)
        - prompt_s(cost, prompt_tokens - cached_tokens, cached_tokens, step_tokens=step_tokens),
    )


def prompt_s(cost: StepCost, num_tokens: int, context_len: int, *, step_tokens: int) -> float:
    """Return the seconds of the steps that compute `num_tokens` tokens of a prompt after `context_len` others.
    Splitting a prompt into steps leaves the number of pairs that attend to each other as it is, so each further step
    adds only its fixed cost."""
    if num_tokens <= 0:
        return 0.0
    if num_tokens == 1:
        return cost.seconds(StepWork().plus_rows([context_len]))
    fixed_s = cost.seconds(StepWork())
    more_steps = -(-num_tokens // step_tokens) - 1
    return cost.seconds(StepWork().plus_chunk(num_tokens, context_len)) + more_steps * fixed_s
