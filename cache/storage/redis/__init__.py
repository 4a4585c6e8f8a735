"""Extents in Redis servers, which other servers can load too."""
