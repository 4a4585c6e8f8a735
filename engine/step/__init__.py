"""Runs a step of the engine, from scheduling to the outputs."""
