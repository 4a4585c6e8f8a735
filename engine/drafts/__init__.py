"""Drafts: what answers may go on with, computed before they have said it."""
