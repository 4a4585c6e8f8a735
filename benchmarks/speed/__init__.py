"""How fast: prefill, decode, returning turns, loads and saves."""
