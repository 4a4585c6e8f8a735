"""Stores of bytes below HBM. A tier decides nothing."""
