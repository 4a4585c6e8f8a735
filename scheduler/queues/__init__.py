"""Holds the orders in which waiting requests may start."""
