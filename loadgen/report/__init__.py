"""Presents results as tables, pages and plots."""
