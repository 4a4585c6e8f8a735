"""Turns a schedule into tokens, in a process of its own."""
