"""Endpoints that are Reprise's own, and those that describe the server."""
