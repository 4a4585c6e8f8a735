"""Keeps the ledgers of the tiers: which block lies where, what is on its way, and what leaves. They touch no bytes."""
