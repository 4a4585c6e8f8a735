"""Stores the bytes of KV: in memory, in files, in Redis, and with the threads that do blocking I/O."""
