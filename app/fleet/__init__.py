"""This server as a member of a fleet."""
