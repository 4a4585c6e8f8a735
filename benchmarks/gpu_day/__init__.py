"""What one call on a machine with a GPU measures, in sections; see `__main__`."""
