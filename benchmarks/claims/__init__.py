"""The claims made of Reprise, each with the number that a committed result holds for it."""
