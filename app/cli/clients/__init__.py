"""Other people's clients: their configuration for a running server, and a trial of what they need of it."""
