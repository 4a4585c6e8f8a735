"""Moves bytes to and from Redis, the tier that other servers share."""
