"""Lets Ray Serve start, replace and scale the servers of a fleet."""
