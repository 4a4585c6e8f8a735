"""The engine's process, and the client's side of it."""
