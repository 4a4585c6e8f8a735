"""The bytes: memory, files and the threads that read and write them."""
