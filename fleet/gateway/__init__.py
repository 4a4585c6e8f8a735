"""One address for many replicas: it finds a turn's conversation, sends the turn where its KV lies, and goes on with the
answer elsewhere if that replica is gone."""
