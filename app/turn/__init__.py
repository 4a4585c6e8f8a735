"""Runs one turn, from a checked request to the end of its answer."""
