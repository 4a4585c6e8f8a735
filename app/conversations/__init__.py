"""What was said: transcripts, stored responses, and how a prompt is found in them again."""
