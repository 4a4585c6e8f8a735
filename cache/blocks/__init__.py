"""Blocks: their keys, the table of them, and the contexts made of them."""
