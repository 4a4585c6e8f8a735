"""Reads quantised checkpoints, each format in a file of its own, without the libraries that wrote them."""
