"""Decides which requests run next. Pure: no torch, no files, no clock; each call gets the time as `now`."""
