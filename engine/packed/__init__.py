"""Keeps models whose weights stay packed to 4 or 8 bits in memory."""
