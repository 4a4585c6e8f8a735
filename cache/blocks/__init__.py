"""Defines blocks of KV: their keys, the table that finds them, and the contexts made of them."""
