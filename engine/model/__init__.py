"""The model: loading it, proving it and running it."""
