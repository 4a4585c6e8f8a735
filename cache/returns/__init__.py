"""Learns when sessions come back, and ranks them for eviction."""
