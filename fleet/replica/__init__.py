"""Makes a server a member of a fleet."""
