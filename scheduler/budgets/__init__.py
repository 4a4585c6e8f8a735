"""How much a step may compute."""
