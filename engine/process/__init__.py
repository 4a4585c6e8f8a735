"""Runs the engine in a process of its own, and is the app's client to it."""
