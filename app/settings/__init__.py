"""Settings: their names, defaults, sources and help."""
