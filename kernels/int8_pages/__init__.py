"""A page format: KV in HBM at a byte a number (`cache.hbm_dtype int8`)."""
