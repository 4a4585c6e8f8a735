"""Compiled kernels for CPUs."""
