"""Provides faster implementations of a model's parts on CPU. Each is checked against the original before it is used."""
