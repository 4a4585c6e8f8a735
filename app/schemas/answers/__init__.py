"""Models of the answers, for the API description. Answers are built as plain dicts; tests compare them with these."""
