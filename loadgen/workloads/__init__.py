"""Workloads: synthetic ones, dialogues and traces."""
