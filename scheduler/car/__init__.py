"""The policy `car`: CaR's order to the letter of the paper, as far as it says. A shuffled window by transfer class, a
prefetch timer, and scores by which KV leaves HBM. The rest of the scheduler does not know of it."""
