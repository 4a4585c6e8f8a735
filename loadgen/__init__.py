"""Measures a server from outside, and simulates one: workloads, a streaming client, reports.

Until the load generator moves in here, the benchmarks keep their own client (`benchmarks/streams.py`).
"""
