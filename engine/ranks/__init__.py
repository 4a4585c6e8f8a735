"""Runs one engine in several processes of one machine, each with its part of every layer and head (tensor
parallelism)."""
