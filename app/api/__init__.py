"""The HTTP interface: one folder for each family of endpoints."""
