"""Takes a request through the cache, from its opening to the publishing of the blocks it computed."""
