"""Requests and answers as they stand in JSON."""
