"""Limits what each client may do, by its key: answers at once (places), requests and tokens a minute, kept sessions and
bytes (quotas), and its share of the engine (weights)."""
