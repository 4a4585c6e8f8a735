"""Loads a model, checks that it can be served correctly, and runs it."""
