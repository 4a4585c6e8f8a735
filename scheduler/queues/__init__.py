"""The orders in which waiting requests start."""
