"""Holds the streams of the tier that other servers share."""
