"""Keeps the ledgers of the tiers: which block lies where, what is being moved, and what is evicted. They touch no
bytes."""
