"""Workloads: synthetic conversations, dialogues and traces."""
