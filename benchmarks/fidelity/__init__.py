"""Whether the text is right: equality, replayed dialogues and the soak."""
