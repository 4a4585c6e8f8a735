"""Weights that lie in DRAM and pass through HBM layer by layer, for models larger than it (`weights.offload`)."""
