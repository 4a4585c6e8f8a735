"""Keeps extents in Redis servers, which other servers can load too."""
