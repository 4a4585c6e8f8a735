"""Limits what each client may do: keys, places, rates, quotas and weights."""
