"""A request's way through the cache, from opening to publishing."""
