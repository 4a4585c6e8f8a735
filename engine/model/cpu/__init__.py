"""Faster ways through a model on a CPU, each proven before it is used."""
