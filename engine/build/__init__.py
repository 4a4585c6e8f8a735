"""Composition: an engine made of its configuration and the machine."""
