"""Stores KV in tiers (HBM, DRAM, disk, Redis) and decides what moves between them. Only `transfer` and `storage` do
I/O."""
