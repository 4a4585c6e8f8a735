"""Contexts larger than HBM: attention over blocks that are parked in DRAM."""
