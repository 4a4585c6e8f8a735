"""Replays recorded requests, whose prompts are given as names of blocks: equal names stand for equal text."""
