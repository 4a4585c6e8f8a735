"""The command `reprise`."""
