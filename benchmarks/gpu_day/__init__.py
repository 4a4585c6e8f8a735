"""Measures a machine with a GPU in one call, in sections of items; see `__main__`."""
