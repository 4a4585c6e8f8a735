"""Attends over contexts larger than HBM, some of whose blocks lie in DRAM without a page in HBM (parked blocks)."""
