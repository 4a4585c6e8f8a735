"""Sends load to a real server and measures it."""
