"""Learns when sessions return with another turn, and ranks them for eviction."""
