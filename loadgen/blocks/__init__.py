"""Replays recorded requests, given by the names of their blocks."""
