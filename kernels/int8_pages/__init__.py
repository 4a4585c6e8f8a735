"""Defines a page format: KV in HBM with one byte per number (`cache.hbm_dtype int8`)."""
