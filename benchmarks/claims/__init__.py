"""What is claimed of Reprise, each with the number that a committed result holds for it."""
