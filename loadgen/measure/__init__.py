"""Load on a real server, and its measurement."""
