"""Replays of block traces."""
