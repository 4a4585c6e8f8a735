"""Gives many replicas one address: finds a turn's conversation, sends the turn where its KV lies, and has the answer
continued elsewhere if that replica is gone."""
