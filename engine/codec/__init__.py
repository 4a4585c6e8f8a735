"""Calibrates lossy codecs of KV so that they change a model's answers little, and measures how much they do."""
