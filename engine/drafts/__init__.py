"""Drafts how answers may continue, so that a step can compute several tokens of an answer at once."""
