"""Replays block traces."""
