"""Simulates models whose weights and KV lie in host memory, as HybridServe (arXiv 2501.01792) and FlexGen run them."""
