"""Runs the engine in a process of its own, and has the client by which the app talks to it."""
