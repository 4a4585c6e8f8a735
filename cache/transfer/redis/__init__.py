"""Streams of the tier that other servers share."""
