"""Pictures and tables drawn from committed results."""
