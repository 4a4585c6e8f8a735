"""Provides faster implementations of a model's parts on CUDA. Each is checked against the original before it is
used."""
