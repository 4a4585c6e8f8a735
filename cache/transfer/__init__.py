"""Moves KV between the tiers, in threads."""
