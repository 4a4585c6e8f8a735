"""Attends over contexts larger than HBM, whose blocks are partly parked in DRAM."""
