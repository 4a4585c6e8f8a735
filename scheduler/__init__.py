"""Decides which requests run next. Pure: no torch, no files, no clock; time comes in as `now`."""
