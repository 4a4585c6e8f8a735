"""Provides compiled kernels for CPUs."""
