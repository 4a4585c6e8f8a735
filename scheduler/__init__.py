"""Decides who runs next. Pure: no torch, no files, no clock; time comes in as `now`."""
