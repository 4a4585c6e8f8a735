"""Composes an engine from its configuration and the machine."""
