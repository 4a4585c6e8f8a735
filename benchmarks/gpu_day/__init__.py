"""What one call on a machine with a GPU measures, in sections of items; see `__main__`."""
