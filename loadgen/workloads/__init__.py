"""Provides workloads: synthetic conversations, dialogues and traces."""
