"""Stores what was said: transcripts and stored responses. Finds a prompt's history in them again."""
