"""Keeps KV in its tiers and decides what moves between them. Only `transfer` and `storage` do I/O."""
