"""When sessions come back: what is learned of it, and what follows for eviction."""
