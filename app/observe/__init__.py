"""Observers of a turn: metrics, the live view, traces and logs."""
