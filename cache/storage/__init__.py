"""Holds the bytes: memory, files, and the threads that do blocking I/O."""
