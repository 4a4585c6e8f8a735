"""Stores extents in Redis servers, so that other servers can load them too."""
