"""Runs the server's own scheduler and cache on a virtual clock, without a model."""
