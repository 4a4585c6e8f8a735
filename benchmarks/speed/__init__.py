"""Measures how fast prefill, decode, returning turns, loads and saves are."""
