"""Takes a request through the cache, from its opening to the publishing of what it computed."""
