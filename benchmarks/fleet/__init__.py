"""Holds fleets of real processes to what they promise, while they are struck."""
