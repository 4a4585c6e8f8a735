"""The HTTP process. Imports no torch; the only reader of settings and of the environment."""
