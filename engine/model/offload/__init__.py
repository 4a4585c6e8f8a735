"""Keeps weights in DRAM and passes them through HBM layer by layer, for models larger than HBM (`weights.offload`)."""
