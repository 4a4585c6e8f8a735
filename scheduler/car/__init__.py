"""The policy `car`: the scheduler of the paper CaR (§III-B), as far as the paper says it. A shuffled window by transfer
class, a prefetch timer, and scores by which KV leaves HBM. The rest of the scheduler does not know of it."""
